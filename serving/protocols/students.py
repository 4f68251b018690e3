"""``/v1/students``: how groups of students answer under the present load."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi import APIRouter

from serving.hosted.services import Services
from serving.protocols.schemas import StudentsItem, StudentsList
from serving.requests.context import Here

router = APIRouter(prefix="/v1/students", tags=["students"])


@router.get("", response_model=StudentsList, summary="Show how many students answer")
async def list_students(here: Here) -> StudentsList:
    """Of every backbone that has groups of students: how many of them answer now, by which rule, and how often that
    changed since the start."""
    return StudentsList(students=await asyncio.to_thread(_items, here.services))


def _items(services: Services) -> list[StudentsItem]:
    found = []
    for service in services.all:
        engine = service.started
        if engine is None or (own := engine.report().students) is None:
            continue
        rule = dataclasses.asdict(own.rule)
        told: dict[str, Any] = {**vars(own), **rule, "groups": own.groups, "side_by_side": rule["groups"]}
        del told["rule"]
        found.append(StudentsItem(backbone=service.backbone.name, **told))
    return found
