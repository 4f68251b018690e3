"""``/v1/students``: how groups of students answer under the present load."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request

from serving.hosted.services import Services
from serving.http.uploads import FILE_BODY
from serving.jobs.request import MakeStudents
from serving.protocols.jobs import HereJobs, create
from serving.protocols.schemas import JobItem, StudentsItem, StudentsList
from serving.requests.context import Here

router = APIRouter(prefix="/v1/students", tags=["students"])


@router.get("", response_model=StudentsList, summary="Show how many students answer")
async def list_students(here: Here) -> StudentsList:
    """Of every backbone that has groups of students: how many of them answer now, by which rule, and how often that
    changed since the start."""
    return StudentsList(students=await asyncio.to_thread(_items, here.services))


@router.post("", response_model=JobItem, status_code=202, summary="Train a group", openapi_extra=FILE_BODY)
async def create_group(
    request: Request, here: Here, jobs: HereJobs, asked: Annotated[MakeStudents, Query()]
) -> JobItem:
    """The body are labelled texts, or an archive that has texts without labels too; the query the options of `jpets
    students train`: `teacher` is a task of this server, `backbone` a shallow backbone that is loaded, and
    `other_backbones` others to choose from. 202: a job trains the group, which is then published as a new version of
    `task`."""
    return await create(request, here, jobs, asked, "labelled texts")


def _items(services: Services) -> list[StudentsItem]:
    found = []
    for service in services.all:
        engine = service.started
        if engine is None or (own := engine.report().students) is None:
            continue
        found.append(
            StudentsItem(
                backbone=service.backbone.name,
                groups=own.groups,
                largest=own.largest,
                answering=own.answering,
                drops=own.drops,
                additions=own.additions,
                answers=dict(own.answers),
                kept=dict(own.kept),
                fixed=own.rule.fixed,
                side_by_side=own.side_by_side,
                together=own.together,
                window=own.rule.window,
            )
        )
    return found
