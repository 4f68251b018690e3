"""``/v1/backbones``: which backbones there are, and load or unload one while the server runs."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from serving.hosted.backbones import Hosted
from serving.protocols.schemas import BackboneItem, BackboneList
from serving.requests.context import Context, Here

router = APIRouter(prefix="/v1/backbones", tags=["backbones"])


@router.get("", response_model=BackboneList, summary="List the backbones")
async def list_backbones(here: Here) -> BackboneList:
    """The first is the one that the server was started with."""
    found = await asyncio.to_thread(here.services.backbones.list)
    return BackboneList(backbones=[_item(here, hosted) for hosted in found])


@router.put(
    "/{name}",
    response_model=BackboneItem,
    status_code=202,
    responses={200: {"model": BackboneItem, "description": "It is ready already"}},
    summary="Load a backbone",
)
async def load_backbone(here: Here, name: str) -> JSONResponse:
    """202: it starts, with every task that is stored for it; `GET /v1/backbones` says when it is ready. Others are
    served meanwhile."""
    hosted = await asyncio.to_thread(here.services.backbones.load, name)
    return JSONResponse(_item(here, hosted).model_dump(), 200 if hosted.state == "ready" else 202)


@router.delete("/{name}", status_code=204, response_class=Response, summary="Unload a backbone")
async def unload_backbone(here: Here, name: str) -> Response:
    """204 when its last query is answered, or the time of grace is over, and its memory is free. Its tasks stay stored,
    and are not found until it is loaded again. 409 while a job makes something of it."""
    if here.jobs is not None:
        await asyncio.to_thread(here.jobs.check_unused, name)
    await asyncio.to_thread(here.services.backbones.unload, name)
    return Response(status_code=204)


def _item(here: Context, hosted: Hosted) -> BackboneItem:
    item = BackboneItem(
        name=hosted.name,
        state=hosted.state,
        default=hosted.name == here.services.first.backbone.name,
        problem=hosted.problem,
    )
    if hosted.service is None:
        return item
    backbone, (what, done, total) = hosted.service.backbone, hosted.service.phase
    item.fingerprint, item.family = backbone.fingerprint, backbone.config.family
    item.hidden_size, item.layers = backbone.config.hidden_size, backbone.config.layers
    if hosted.state == "starting":
        item.progress = f"{what} {done}/{total}" if total else what
    if (engine := hosted.service.started) is not None and "admin" in here.asker.scopes:  # they tell of others' tasks
        report = engine.report()
        item.device_bytes, item.tasks = report.device_bytes, report.known
    return item
