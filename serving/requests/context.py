"""What every endpoint needs, as one FastAPI dependency."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
from typing import Annotated

from fastapi import Depends, Request

from jpets.types import Task
from serving.hosted.services import Services
from serving.http.aside import Aside
from serving.http.settings import ServingSettings
from serving.http.uploads import Turns
from serving.jobs.service import Jobs
from serving.requests.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class Context:
    service: Services
    settings: ServingSettings
    metrics: Metrics
    jobs: Jobs | None = None
    aside: Aside = dataclasses.field(default_factory=Aside)
    turns: Turns = dataclasses.field(default_factory=Turns)
    """Of uploads that are checked."""

    async def find(self, model: str) -> Task | None:
        """``Service.find``, away from the event loop where it has to read."""
        if self.service.at_hand(model):
            return self.service.find(model)
        return await asyncio.to_thread(self.service.find, model)


async def find_context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Here = Annotated[Context, Depends(find_context)]


@functools.cache
def server_version() -> str:
    try:
        return importlib.metadata.version("jpets")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"
