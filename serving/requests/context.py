"""What every endpoint needs, as one FastAPI dependency."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
from typing import Annotated, NamedTuple

from fastapi import Depends, Request

from jpets.types import DEFAULT_TENANT, Task, TaskName
from serving.hosted.services import Services
from serving.http.aside import Aside
from serving.http.settings import ServingSettings
from serving.http.uploads import Turns
from serving.jobs.service import Jobs
from serving.requests.metrics import Metrics


class Asker(NamedTuple):
    """The tenant and priority of a request. Names of tasks in it are the tenant's; queries of a higher ``priority`` are
    served before all others."""

    tenant: str = DEFAULT_TENANT
    priority: int = 0


DEFAULT_ASKER = Asker()


@dataclasses.dataclass(frozen=True)
class Context:
    services: Services
    settings: ServingSettings
    metrics: Metrics
    jobs: Jobs | None = None
    asker: Asker = DEFAULT_ASKER
    aside: Aside = dataclasses.field(default_factory=Aside)
    turns: Turns = dataclasses.field(default_factory=Turns)
    """Turns of uploads that are checked."""

    def named(self, id: str) -> TaskName:
        """The request's task of this id."""
        return TaskName(self.asker.tenant, id)

    async def find(self, model: str) -> Task | None:
        """``Outlines.find``, off the event loop if it has to read."""
        name = self.named(model)
        with self.services.owning(name) as own:
            if own.outlines.at_hand(name):
                return own.outlines.find(name)
        return await asyncio.to_thread(self._find, name)

    def _find(self, name: TaskName) -> Task | None:
        with self.services.owning(name) as own:
            return own.outlines.find(name)


async def find_context(request: Request) -> Context:
    """The context of a request. The asker is set here: so far it is always the default tenant."""
    context: Context = request.app.state.context
    return context


Here = Annotated[Context, Depends(find_context)]


@functools.cache
def server_version() -> str:
    try:
        return importlib.metadata.version("jpets")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"
