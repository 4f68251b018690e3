"""What every endpoint needs, as one FastAPI dependency."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from jpets.errors import Forbidden, NotFound
from jpets.tokenizing import TextEncoder
from jpets.types import DEFAULT_TENANT, Task, TaskName
from serving.hosted.repository import StoredTask
from serving.hosted.services import Services
from serving.http.aside import Aside
from serving.http.settings import ServingSettings
from serving.http.uploads import Room, Turns
from serving.jobs.service import Jobs
from serving.requests.metrics import Metrics
from serving.tenants.asker import NOBODY, Asker
from serving.tenants.keyring import Keyring
from serving.tenants.scopes import scope_of

PAGE = 1000
MOST_PAGES = 10
"""Tasks that a filter looks at at once."""


@dataclasses.dataclass(frozen=True)
class Context:
    services: Services
    settings: ServingSettings
    metrics: Metrics
    jobs: Jobs | None = None
    asker: Asker = NOBODY
    aside: Aside = dataclasses.field(default_factory=Aside)
    turns: Turns = dataclasses.field(default_factory=Turns)
    """Turns of uploads that are checked."""
    room: Room = dataclasses.field(default_factory=Room)
    """For uploads that are on their way."""
    keyring: Keyring = dataclasses.field(default_factory=Keyring)
    arrived: float = 0.0
    """When the head of the request came (``time.monotonic``): its deadline is counted from then."""

    def asked_by(self, asker: Asker, arrived: float) -> Context:
        """The same for a request of ``asker`` that came then."""
        return dataclasses.replace(self, asker=asker, arrived=arrived)

    def named(self, id: str) -> TaskName:
        """The task that queries for this id get: the tenant's own, or else the shared one."""
        return self.services.resolve(self.own(id))

    def own(self, id: str) -> TaskName:
        """The tenant's task of this id, which it may change."""
        return TaskName(self.asker.tenant, id)

    async def encoder(self, id: str | None) -> TextEncoder:
        """What makes tokens of a task's or a backbone's texts, by default the first one's: reading it takes a while."""
        with self.services.owning(self.named(id or self.services.first.backbone.name)) as own:
            return own.text if own.has_text else await asyncio.to_thread(lambda: own.text)

    def stored(self, id: str, version: int | str | None = None) -> StoredTask:
        """A version of the tenant's task, or of the shared one where it has none of this id. Blocks. Raises
        ``NotFound``."""
        repository, tenant = self.services.repository, self.asker.tenant
        if tenant != DEFAULT_TENANT:
            try:
                own = repository.get(id, tenant)
            except NotFound:
                tenant = DEFAULT_TENANT
            else:
                if version is None:
                    return own
        return repository.get(id, tenant, version)

    def listed(
        self, limit: int, after: str | None = None, wanted: Callable[[StoredTask], bool] | None = None
    ) -> tuple[Sequence[StoredTask], str | None]:
        """Up to ``limit`` tasks that the tenant may ask for, or the ``wanted`` ones of these, by id, past ``after``,
        and the next ``after`` or None. Where few are wanted it looks at ``MOST_PAGES`` pages. Blocks."""
        page = partial(self.services.repository.list, self.asker.tenant, beside=DEFAULT_TENANT)
        if wanted is None:
            return page(limit=limit, after=after)
        found: list[StoredTask] = []
        for _ in range(MOST_PAGES):
            some, after = page(limit=PAGE, after=after)
            found += filter(wanted, some)
            if len(found) > limit:
                return found[:limit], found[limit - 1].id
            if after is None:
                break
        return found, after

    def refuse_shared(self, id: str) -> None:
        """Blocks. Raises ``Forbidden`` where the tenant may ask for the task, but does not own it."""
        if self.asker.tenant == DEFAULT_TENANT:
            return
        with contextlib.suppress(NotFound):
            if self.stored(id).tenant == DEFAULT_TENANT:
                raise Forbidden(f"task {id!r} is shared; only keys of tenant {DEFAULT_TENANT!r} change it")

    def task_id(self, model: str | None) -> str | None:
        """The id of the task that ``model`` names; None, the plain backbone, also for the backbone's own name."""
        if model == self.services.first.backbone.name and not self.services.knows(self.named(model)):
            return None
        return model

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
    """The context of a request, for its asker. Raises ``Forbidden`` where the route needs another scope."""
    context: Context = request.app.state.context
    state = request.scope["state"]
    asker: Asker = state.get("asker", NOBODY)
    asker.check(scope_of(request.scope["method"], request.scope["route"].path))
    return context.asked_by(asker, state["arrived"])


Here = Annotated[Context, Depends(find_context)]


@functools.cache
def server_version() -> str:
    try:
        return importlib.metadata.version("jpets")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"
