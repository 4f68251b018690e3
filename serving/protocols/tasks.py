"""``/v1/tasks``: upload, list, read, export, roll back and delete tasks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, StreamingResponse

from jpets.errors import InvalidInput, NotFound, OutOfSpace, Saturated
from jpets.files import space_errors
from jpets.types import TaskName
from serving.hosted.repository import StoredTask
from serving.http.fields import Int64, Text
from serving.http.uploads import FILE_BODY, FILE_TYPE, receive
from serving.protocols.schemas import MOST_VERSIONS, TaskDetail, TaskPage, TaskSummary, TaskVersion, VersionPage
from serving.requests.context import Context, Here
from serving.requests.routes import JSONRoute

ETAG = re.compile(r'(?:W/)?"?(\d{1,9})"?')
ANY = "*"
PIECE = 1 << 18
"""Bytes of a task file that are read at a time."""

router = APIRouter(prefix="/v1/tasks", tags=["tasks"])
IfMatch = Annotated[str | None, Header(description="the version that must be the newest one; 409 where it is not")]
IfNoneMatch = Annotated[str | None, Header(description="`*`: the task must not exist yet; 409 where it does")]


class RollbackRequest(BaseModel):
    """``version`` is a number or an alias; by default the version served before."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[Int64, Field(ge=0, le=MOST_VERSIONS)] | Annotated[Text, Field(max_length=64)] | None = None


class AliasRequest(BaseModel):
    """``version`` is a number or another alias."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[Int64, Field(ge=1, le=MOST_VERSIONS)] | Annotated[Text, Field(max_length=64)]


Filter = Annotated[str | None, Query(max_length=128)]


@router.get("", response_model=TaskPage, summary="List tasks by id, a page at a time")
async def list_tasks(
    here: Here,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Filter = None,
    search: Filter = None,
    backbone: Filter = None,
    head: Filter = None,
    method: Filter = None,
    tenant: Filter = None,
) -> TaskPage:
    """All, or those that all given filters let through: `search` finds a part of the id, a label or the description, in
    any case; the others compare a name: of the backbone, of the head's type, of one of the deltas' methods, and of the
    tenant that owns the task. A page of many tasks that few filters let through may be short, or empty: `next` goes on.
    """

    def wanted(stored: StoredTask) -> bool:
        document = stored.metadata
        texts = (stored.id, *document.get("labels", ()), document.get("description") or "")
        return (
            (search is None or any(search.casefold() in text.casefold() for text in texts))
            and backbone in (None, document["backbone"]["name"])
            and head in (None, document["head"]["type"])
            and (method is None or method in [delta["method"] for delta in document["deltas"]])
            and tenant in (None, stored.tenant)
        )

    filtered = any(each is not None for each in (search, backbone, head, method, tenant))
    found, following = await asyncio.to_thread(here.listed, limit, after, wanted if filtered else None)
    return TaskPage(tasks=[TaskSummary.of(stored) for stored in found], next=following)


@router.put(
    "/{id}",
    response_model=TaskDetail,
    status_code=201,
    responses={202: {"model": TaskDetail, "description": "Stored; served once the programs of its shape are there"}},
    summary="Upload a task file as a new version",
    openapi_extra=FILE_BODY,
)
async def put_task(
    request: Request, here: Here, id: str, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> JSONResponse:
    """201: the next query sees it. 202: it is the first of its shape, and programs are being compiled; `GET` says
    when it is served (`state`), and until then an old version is. On any error nothing has changed, and the old version
    goes on serving."""
    name, expected = here.own(id), _expected(if_match, if_none_match)
    here.services.first.check_open()
    async with _received(request, here) as (file, size):
        stored = await here.turns.check(size, partial(here.services.put_task, name, file, expected))
    return await _answer(here, stored, 202 if here.services.preparation(name) else 201)


@router.get(
    "/{id}",
    response_model=TaskDetail,
    responses={200: {"content": {FILE_TYPE: {}}}},
    summary="Read a task's description",
)
async def get_task(
    request: Request, here: Here, id: str, version: Annotated[str | None, Query(max_length=64)] = None
) -> Response:
    """Which version is served, which there are, and what one of them is: `version` is a number or an alias, by default
    the served one. With `Accept: application/octet-stream` the task file itself."""
    if request.headers.get("accept", "").split(";")[0].strip() == FILE_TYPE:
        return await get_file(here, id, version)
    own = here.own(id)
    try:
        stored = await asyncio.to_thread(here.stored, id, _version(version))
    except NotFound:
        _check_preparation(here, own)
        raise
    if stored.name != own:
        _check_preparation(here, own)
    return await _answer(here, stored, 200)


@router.get("/{id}/versions", response_model=VersionPage, summary="List the versions of a task, a page at a time")
async def list_versions(
    here: Here,
    id: str,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int, Query(ge=0, le=MOST_VERSIONS)] = 0,
) -> VersionPage:
    """Those that are kept, the oldest first: the last few, the one that is served, and those that have an alias."""
    kept = await asyncio.to_thread(lambda: here.services.repository.versions(id, here.stored(id).tenant))
    found = [stored for stored in kept if stored.version > after]
    following = found[limit - 1].version if len(found) > limit else None
    return VersionPage(versions=[TaskVersion.of(stored) for stored in found[:limit]], next=following)


@router.get(
    "/{id}/file", response_class=Response, responses={200: {"content": {FILE_TYPE: {}}}}, summary="Export a task file"
)
async def get_file(here: Here, id: str, version: Annotated[str | None, Query(max_length=64)] = None) -> Response:
    """The very bytes that were uploaded."""
    here.asker.check("manage")  # also for those who ask for them at the description's path
    repository = here.services.repository
    stored = await asyncio.to_thread(here.stored, id, _version(version))
    file = await asyncio.to_thread(repository.file, stored)
    headers = {
        **_etag(stored),
        "Content-Disposition": f'attachment; filename="{id}.safetensors"',
        "Content-Length": str(stored.bytes),
    }
    return StreamingResponse(_pieces(file), headers=headers, media_type=FILE_TYPE)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """A client that reads slowly, or asks for many files, takes no more memory than a piece of each."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece


async def rollback(request: Request, here: Here, id: str, body: RollbackRequest | None = None) -> JSONResponse:
    """200: the next query sees it. Versions newer than the target are withdrawn. `If-Match` is the version that must be
    the newest one; 409 where it is not."""
    name, version = here.own(id), body.version if body else None
    expected = _expected(request.headers.get("if-match"), None)

    def change() -> StoredTask:
        here.refuse_shared(id)
        with here.services.changing(name) as own:
            return own.changes.rollback(name, version, expected)

    stored = await here.turns.change(change)
    return await _answer(here, stored, 200)


router.add_api_route(
    "/{id}/rollback",
    rollback,
    methods=["POST"],
    response_model=TaskDetail,
    summary="Serve an earlier version",
    route_class_override=JSONRoute,
)


async def put_alias(here: Here, id: str, alias: str, body: AliasRequest) -> JSONResponse:
    """Points a name at one of the task's versions, which is then kept however many come after it. Queries get the
    served version all the same: `POST /v1/tasks/ID/rollback` takes an alias."""
    return await _aliased(here, id, alias, body.version)


router.add_api_route(
    "/{id}/aliases/{alias}",
    put_alias,
    methods=["PUT"],
    response_model=TaskDetail,
    summary="Name a version",
    route_class_override=JSONRoute,
)


@router.delete("/{id}/aliases/{alias}", response_model=TaskDetail, summary="Take a version's name back")
async def delete_alias(here: Here, id: str, alias: str) -> JSONResponse:
    """The version stays as long as it would have without the name."""
    return await _aliased(here, id, alias, None)


async def _aliased(here: Context, id: str, alias: str, version: int | str | None) -> JSONResponse:
    name = here.own(id)

    def change() -> StoredTask:
        here.refuse_shared(id)
        here.services.repository.alias(id, alias, version, name.tenant)
        return here.services.repository.get(id, name.tenant)

    return await _answer(here, await here.turns.change(change), 200)


@router.delete("/{id}", status_code=204, response_class=Response, summary="Delete a task with all its versions")
async def delete_task(here: Here, id: str, if_match: IfMatch = None) -> Response:
    """Queries that are already on their way still get their answer."""
    name, expected = here.own(id), _expected(if_match, None)

    def change() -> None:
        here.refuse_shared(id)
        with here.services.changing(name) as own:
            own.changes.delete(name, expected)

    await here.turns.change(change)
    return Response(status_code=204)


def _check_preparation(here: Context, name: TaskName) -> None:
    """Raises ``OutOfSpace`` where a first version could not be served, and was forgotten."""
    if (last := here.services.preparation(name)) is not None and last.problem is not None and not last.coming:
        raise OutOfSpace(last.problem)


async def _answer(here: Context, stored: StoredTask, status: int) -> JSONResponse:
    name = stored.name
    with here.services.owning(name) as own:
        where: dict[str, Any] = {"tier": own.tasks.tier(name), "devices": list(own.tasks.devices(name))}
    kept, aliases = await asyncio.to_thread(_kept, here, stored)
    last = here.services.preparation(name)
    if last is not None:
        where |= {"state": "preparing" if last.coming else "failed", "problem": last.problem}
    with here.services.owning(name) as own:
        loaded = own.tasks.version(name)
    detail = TaskDetail.of(stored, kept=kept, aliases=aliases, loaded=loaded, **where)
    return JSONResponse(detail.model_dump(), status, _etag(stored))


def _kept(here: Context, stored: StoredTask) -> tuple[Sequence[StoredTask], Mapping[str, int]]:
    """All versions of a task and their aliases; none if it was deleted just now, or the catalogue is busy: the change
    itself is made."""
    repository = here.services.repository
    try:
        return repository.versions(stored.id, stored.tenant), repository.aliases(stored.id, stored.tenant)
    except (NotFound, Saturated):
        return (), {}


def _etag(stored: StoredTask) -> dict[str, str]:
    return {"ETag": f'"{stored.version}"'}


def _version(given: str | None) -> int | str | None:
    """Raises ``InvalidInput`` for a number that no version can have."""
    if given is None or not given.isdecimal():
        return given
    if (number := int(given)) > MOST_VERSIONS:
        raise InvalidInput(f"version: expected a number of at most {MOST_VERSIONS}, or an alias")
    return number


def _expected(if_match: str | None, if_none_match: str | None) -> int | None:
    """The version that must be the newest; 0: the task must not exist."""
    if if_none_match is not None:
        if if_none_match != ANY or if_match is not None:
            raise InvalidInput("If-None-Match must be * and the only condition")
        return 0
    if if_match is None:
        return None
    found = ETAG.fullmatch(if_match)
    if found is None:
        raise InvalidInput('If-Match must be one version, for example "3"')
    return int(found[1])


@contextlib.asynccontextmanager
async def _received(request: Request, here: Context) -> AsyncIterator[tuple[Path, int]]:
    """The body in a temporary file, which is gone afterwards, and how many bytes it has.

    Raises ``TooLarge``, ``OutOfSpace``, ``Saturated``, ``ClientGone``.
    """
    folder = here.settings.upload_folder
    with (
        here.room.upload(here.asker.tenant) as count,
        space_errors(),
        tempfile.NamedTemporaryFile(dir=folder, prefix="jpets-") as file,
    ):
        size = await receive(request, file, here.settings.max_task_bytes, "a task file", count)
        yield Path(file.name), size
