"""``/v1/domains``: the tables of n-gram vectors of backbones whose lower layers they stand for."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from jpets.errors import Conflict, NotFound
from serving.hosted.domains import tasks_of_domains
from serving.hosted.service import Service
from serving.hosted.services import Services, by_name
from serving.http.uploads import FILE_BODY
from serving.jobs.request import MakeDomain
from serving.jobs.service import Jobs
from serving.protocols.jobs import HereJobs, create
from serving.protocols.schemas import DomainItem, DomainList, JobItem
from serving.requests.context import Here

router = APIRouter(prefix="/v1/domains", tags=["domains"])


@router.get("", response_model=DomainList, summary="List the domains")
async def list_domains(here: Here) -> DomainList:
    """Of every backbone with tables: their sizes, and for a key of scope `admin` the tasks that use them, and where the
    tokens of texts were found since the start. The root, which all domains of a backbone share, has no name."""
    return DomainList(domains=await asyncio.to_thread(_items, here.services, whole=here.asker.may("admin")))


@router.post("", response_model=JobItem, status_code=202, summary="Make a domain", openapi_extra=FILE_BODY)
async def create_domain(request: Request, here: Here, jobs: HereJobs, asked: Annotated[MakeDomain, Query()]) -> JobItem:
    """The body are texts without labels, the query the options of `jpets plot domain`. 202: a job makes it when the
    jobs before it have finished; the server answers meanwhile, and takes the table without a stop. Replaces a domain of
    that name; 409 where tasks use it that could not be served with other n-gram layers."""
    return await create(request, here, jobs, asked, "texts")


@router.delete("/{name}", status_code=204, response_class=Response, summary="Delete a domain")
async def delete_domain(here: Here, jobs: HereJobs, name: str, backbone: str | None = None) -> Response:
    """Of the first backbone unless another one is named. 409 while tasks use it, or jobs that have not finished."""
    await asyncio.to_thread(_delete, here.services, jobs, name, backbone)
    return Response(status_code=204)


def _items(services: Services, *, whole: bool) -> list[DomainItem]:
    """``whole``: with the figures of all tenants."""
    used = tasks_of_domains(services) if whole else None
    found = []
    for service in services.all:
        if (tables := service.backbone.tables) is None:
            continue
        for own in tables.report():
            total = sum(own.levels.values())
            found.append(
                DomainItem(
                    backbone=service.backbone.name,
                    name=own.name or None,
                    full_name=own.full_name if own.name else None,
                    entries=own.entries,
                    bytes=own.bytes,
                    tasks=None if used is None else used[service.backbone.fingerprint, own.name],
                    tokens=total if whole else None,
                    found={level: count / total for level, count in own.levels.items()} if total and whole else {},
                    problem=own.problem,
                )
            )
    return found


def _delete(services: Services, jobs: Jobs, name: str, backbone: str | None) -> None:
    """Raises ``NotFound``, ``Conflict``."""
    service = _service(services, backbone)
    if service.backbone.tables is None:
        raise NotFound(f"backbone {service.backbone.name!r} has no tables")
    with service.tasks.domains, jobs.without_domain(service.backbone.name, name):
        if count := tasks_of_domains(services)[service.backbone.fingerprint, name.partition("@")[0]]:
            raise Conflict(f"{count} tasks use domain {name!r}; delete them first")
        service.backbone.tables.remove(name)


def _service(services: Services, name: str | None) -> Service:
    """Raises ``NotFound``."""
    if name is None:
        return services.first
    if (found := by_name(services).get(name)) is None:
        raise NotFound(f"backbone {name[:128]!r} is not loaded")
    return found
