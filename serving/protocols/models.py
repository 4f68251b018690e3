"""``/v1/models``: the models that can be queried, as OpenAI's clients list them."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from jpets.errors import NotFound
from serving.hosted.repository import StoredTask
from serving.http.responses import FastJSONResponse
from serving.requests.context import Context, Here

router = APIRouter(prefix="/v1/models", tags=["inference"])
PAGE = 500
"""Tasks that are read from the repository at once."""


class ModelItem(BaseModel):
    """``created`` is a Unix time, 0 for a backbone."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["jpets"]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelItem]


@router.get("", response_model=ModelList, summary="List backbones and tasks as models")
async def list_models(here: Here) -> FastJSONResponse:
    """The backbones that are ready, which embed, and the tasks of `GET /v1/tasks` that they serve, in one list."""
    data = await asyncio.to_thread(lambda: list(_items(here)))
    return FastJSONResponse({"object": "list", "data": data})


@router.get("/{id:path}", response_model=ModelItem, summary="Read one of them")
async def get_model(here: Here, id: str) -> FastJSONResponse:
    if item := next((item for item in _backbones(here) if item["id"] == id), None):
        return FastJSONResponse(item)
    if not here.services.knows(here.named(id)):
        raise NotFound(f"unknown model {id[:128]!r}; GET /v1/models lists what there is")
    return FastJSONResponse(_item(await asyncio.to_thread(here.stored, id)))


def _items(here: Context) -> Iterator[dict[str, Any]]:
    yield from _backbones(here)
    after = None
    while True:
        found, after = here.listed(PAGE, after)
        yield from (_item(stored) for stored in found if here.services.knows(stored.name))
        if after is None:
            return


def _backbones(here: Context) -> Iterator[dict[str, Any]]:
    return (_model(hosted.name, 0) for hosted in here.services.backbones.list() if hosted.state == "ready")


def _item(stored: StoredTask) -> dict[str, Any]:
    return _model(stored.id, int(datetime.datetime.fromisoformat(stored.created).timestamp()))


def _model(id: str, created: int) -> dict[str, Any]:
    return {"id": id, "object": "model", "created": created, "owned_by": "jpets"}
