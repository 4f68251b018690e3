"""``/v1/jobs``: make tasks and backbones beside serving them; list, follow and cancel that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import JSONResponse

from jpets.errors import InvalidInput, NotFound
from jpets.files import space_errors
from serving.http.uploads import FILE_BODY, receive
from serving.jobs.folder import JobFolder
from serving.jobs.request import Extract, FineTune, FurtherPretrain
from serving.jobs.service import Asked, Jobs
from serving.protocols.schemas import JobItem, JobPage
from serving.requests.context import Context, Here

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


async def find_jobs(here: Here) -> Jobs:
    if here.jobs is None:
        raise NotFound("this server runs no jobs; start it by python -m jpets.serve")
    return here.jobs


HereJobs = Annotated[Jobs, Depends(find_jobs)]


@router.post("", response_model=JobItem, status_code=202, summary="Train a task", openapi_extra=FILE_BODY)
async def create_job(request: Request, here: Here, jobs: HereJobs, asked: Annotated[FineTune, Query()]) -> JobItem:
    """The body are the labelled texts, the query the options of `jpets train`. 202: it is trained when the jobs before
    it have finished; the task is then published as a new version, or nothing is where it fails."""
    return await create(request, here, jobs, asked, "labelled texts")


@router.post("/extract", response_model=JobItem, status_code=202, summary="Extract a task", openapi_extra=FILE_BODY)
async def create_extraction(
    request: Request, here: Here, jobs: HereJobs, asked: Annotated[Extract, Query()]
) -> JobItem:
    """The body is a zip archive of a fully fine-tuned checkpoint's folder, the query the options of `jpets task
    import`. What is extracted is published as a new version of the task."""
    return await create(request, here, jobs, asked, "a zip archive of a checkpoint")


@router.post(
    "/further-pretrain",
    response_model=JobItem,
    status_code=202,
    summary="Train a backbone's layers further",
    openapi_extra=FILE_BODY,
)
async def create_pretraining(
    request: Request, here: Here, jobs: HereJobs, asked: Annotated[FurtherPretrain, Query()]
) -> JobItem:
    """The body are texts without labels, the query the options of `jpets backbone pretrain`. The new backbone may then
    be loaded by `PUT /v1/backbones/NAME`; tasks are trained on it anew."""
    return await create(request, here, jobs, asked, "texts")


@router.get("", response_model=JobPage, summary="List jobs, the newest first, a page at a time")
async def list_jobs(
    here: Here,
    jobs: HereJobs,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> JobPage:
    """The tenant's; with the scope `admin` those of all."""
    return await asyncio.to_thread(_page, jobs, _whose(here), limit, after)


@router.get("/{id}", response_model=JobItem, summary="Read a job's state, progress and scores")
async def get_job(here: Here, jobs: HereJobs, id: str) -> JobItem:
    return await asyncio.to_thread(lambda: JobItem.of(jobs.folders.get(id, _whose(here))))


@router.get(
    "/{id}/log", response_class=Response, responses={200: {"content": {"text/plain": {}}}}, summary="Read a job's log"
)
async def get_log(here: Here, jobs: HereJobs, id: str) -> Response:
    """What its processes noted; of a long one the end."""
    content = await asyncio.to_thread(lambda: jobs.folders.get(id, _whose(here)).log())
    return Response(content, media_type="text/plain; charset=utf-8")


@router.delete(
    "/{id}",
    response_model=JobItem,
    status_code=202,
    responses={204: {}},
    summary="Cancel a job, or remove a finished one",
)
async def delete_job(here: Here, jobs: HereJobs, id: str) -> Response:
    """202: it is being cancelled, and publishes nothing; where its server ended while it published, its `problem` says
    so. 204: it had finished, and is gone; its task stays."""

    def delete() -> JobFolder | None:
        job = jobs.folders.get(id, _whose(here))
        return None if jobs.delete(job) else job

    job = await asyncio.to_thread(delete)
    if job is None:
        return Response(status_code=204)
    return JSONResponse((await asyncio.to_thread(JobItem.of, job)).model_dump(), 202)


async def create(request: Request, here: Context, jobs: Jobs, asked: Asked, what: str) -> JobItem:
    """A new job, with the body as its data; ``what`` names that to people."""
    tenant = here.asker.tenant
    asked = await asyncio.to_thread(jobs.accept, asked, tenant)
    async with _draft(jobs, asked, tenant) as draft:
        with draft.data.open("xb") as file:
            got = await receive(request, file, here.settings.max_data_bytes, "training data")
        if not got:
            raise InvalidInput(f"expected {what} as the body, found nothing")
        return await asyncio.to_thread(lambda: JobItem.of(jobs.commit(draft)))


@contextlib.asynccontextmanager
async def _draft(jobs: Jobs, asked: Asked, tenant: str) -> AsyncIterator[JobFolder]:
    """``Jobs.draft``, whose files are made and removed beside the event loop. Raises ``OutOfSpace``, ``Saturated``."""
    stack = contextlib.ExitStack()
    draft = await asyncio.to_thread(stack.enter_context, jobs.draft(asked, tenant))
    try:
        with space_errors():
            yield draft
    finally:
        await asyncio.to_thread(stack.close)


def _whose(here: Context) -> str | None:
    """The tenant whose jobs a request may see; None for those of all."""
    return None if "admin" in here.asker.scopes else here.asker.tenant


def _page(jobs: Jobs, tenant: str | None, limit: int, after: str | None) -> JobPage:
    later = (job for job in jobs.folders.all() if after is None or job.id < after)
    chosen = list(itertools.islice((job for job in later if job.is_of(tenant)), limit + 1))
    items = []
    for job in chosen[:limit]:
        try:
            items.append(JobItem.of(job))
        except NotFound:  # removed meanwhile
            continue
    return JobPage(jobs=items, next=chosen[limit - 1].id if len(chosen) > limit else None)
