"""Several backbones in one server: a service for each, behind one interface. A task belongs to the service of its
backbone."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from jpets.engine.interface import Serves, submit_parts
from jpets.engine.results.stats import BatchObserver
from jpets.errors import Conflict, InvalidInput, InvalidTask, NotFound
from jpets.repeated import Repeated
from jpets.types import DEFAULT_TENANT, Progress, Query, Result, TaskName
from serving.hosted.backbones import Backbones, OpenBackbone, engines_of
from serving.hosted.locks import NamedLocks
from serving.hosted.owned import OwnedTasks
from serving.hosted.preparations import Preparation
from serving.hosted.repository import StoredTask, TaskRepository
from serving.hosted.roster import Roster
from serving.hosted.service import MakeEngine, Service
from serving.hosted.usage import AGEING

log = logging.getLogger(__name__)

FOLLOWING = "following the repository"
COLLECT_SECONDS = 3600.0
"""Between two looks for files of versions that newer ones have replaced: a look lists the whole storage."""


class Services:
    """``first`` is there from the start to the end; ``backbones`` has others come and go.

    The arguments are those of ``Backbones``; ``backbone_of`` gives the fingerprint of the backbone that a task file is
    for. Methods that concern one service use ``first``, or the one of ``owning`` or ``changing``. Methods block;
    thread-safe.
    """

    def __init__(
        self,
        first: Service,
        *,
        available: Callable[[], Sequence[str]] = tuple,
        open_backbone: OpenBackbone | None = None,
        backbone_of: Callable[[Path], str | None] = lambda file: None,
        share_memory: Callable[[Sequence[Serves]], None] = lambda engines: None,
        grace: float = 10.0,
    ) -> None:
        self.first = first
        """Queries without a model are for its backbone."""
        self.repository = first.repository
        watch = self.repository.watch()
        self._roster = Roster(first, watch.wake)
        self.owned = OwnedTasks(first.repository)
        self.backbones = Backbones(self._roster, self.owned, available, open_backbone, share_memory, grace)
        self._backbone_of = backbone_of
        self._locks = NamedLocks[TaskName]()
        self._follower = Repeated(self.refresh, FOLLOWING, watch=watch)
        self._collector = Repeated(self.repository.collect, "freeing space in the repository", COLLECT_SECONDS)

    @property
    def all(self) -> Sequence[Service]:
        """The services that take queries."""
        return self._roster.all

    @property
    def live(self) -> bool:
        return all(service.live for service in self.all)

    @property
    def unreadable(self) -> int:
        return sum(service.unreadable for service in self.all)

    @property
    def started(self) -> Sequence[Serves]:
        """The engines that were started, also while they drain."""
        return engines_of(*self.all)

    @property
    def longest(self) -> int:
        """Tokens of the longest query that any backbone takes."""
        return max((engine.longest for engine in self.started), default=0)

    @property
    def seen_age(self) -> float | None:
        """Seconds since the last look for changes of others in the repository; None before the first time."""
        return self._follower.age

    def start(self, make_engine: MakeEngine, progress: Progress = lambda what, done, total: None) -> None:
        _tidy(self.repository)
        self.owned.refresh()
        self.first.start(make_engine, progress)
        self.backbones.load_kept()
        self._follower.start()
        self._collector.start()

    def refresh(self) -> bool:
        """``Following.refresh`` of every backbone that takes queries; whether any has tasks left to look at again."""
        self.owned.refresh()
        with self._roster.reading(), contextlib.ExitStack() as each:
            services = () if self._roster.closing else self.all
            for service in services:
                each.callback(service.following.refresh)  # an error of one backbone is raised behind the others
        return any(service.following.unfinished for service in services)

    def drain(self) -> None:
        """Refuses new requests; running ones are answered."""
        self._roster.close()
        for service in self.all:
            service.drain()

    def close(self) -> None:
        self.drain()
        with contextlib.ExitStack() as closing:
            for service in self.all:
                closing.callback(service.close)
            closing.callback(self._follower.close)
            closing.callback(self._collector.close)

    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch of every backbone."""
        self._roster.observe(observer)

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        """``Serves.submit``: queries of one backbone reach its engine together."""

        def send(service: Service, some: Sequence[Query]) -> list[Future[Result]]:
            return service.engine.submit(some, deadline=deadline, priority=priority, tenant=tenant)

        self.first.check_open()
        with self._roster.reading():
            if tenant != DEFAULT_TENANT:
                queries = self._with_owners(queries, tenant)
            if len(self.all) == 1:
                return send(self.first, queries)
            routed: dict[Service, list[int]] = defaultdict(list)
            for at, query in enumerate(queries):
                name = query.task_name(tenant)
                own = self._roster.owner(name) if name is not None else None
                routed[own or self.first].append(at)
            return submit_parts(queries, routed, send)

    def _with_owners(self, queries: Sequence[Query], tenant: str) -> Sequence[Query]:
        """Queries for tasks that are shared with ``tenant`` say so."""
        names = {query.task: self.resolve(TaskName(tenant, query.task)) for query in queries if query.task is not None}
        shared = {task for task, name in names.items() if name.tenant != tenant}
        return [replace(query, owner=DEFAULT_TENANT) if query.task in shared else query for query in queries]

    def resolve(self, name: TaskName) -> TaskName:
        """The task that queries for ``name`` get: where the tenant has none of this id, the one of the default tenant,
        whose tasks are shared with all."""
        if name.tenant == DEFAULT_TENANT or name in self.owned or self.knows(name):
            return name
        shared = TaskName.of(name.id)
        return shared if self.knows(shared) else name

    def knows(self, name: TaskName) -> bool:
        """Whether queries may ask for it."""
        return self._roster.owner(name) is not None

    def owning(self, name: TaskName) -> contextlib.AbstractContextManager[Service]:
        """The service that has the task, or the first one, it stays meanwhile."""
        return self._roster.owning(name)

    @contextlib.contextmanager
    def changing(self, name: TaskName) -> Iterator[Service]:
        """``owning``, with the right to change the task, which only one caller has at a time."""
        with self._locks.hold(name), self.owning(name) as service:
            yield service
            self.owned.look(name)

    def preparation(self, name: TaskName) -> Preparation | None:
        """The state of a version that waits for classes, of any backbone."""
        found = (service.preparations.get(name) for service in self.all)
        return next((each for each in found if each is not None), None)

    def put_task(self, name: TaskName, file: Path, if_match: int | None = None) -> StoredTask:
        """``Changes.put`` of the backbone that the file is for. Also raises ``Conflict`` where another backbone has a
        task of that name."""
        fingerprint = self._backbone_of(file) if len(self.all) > 1 else None
        with self._locks.hold(name), self._roster.reading():
            own = next((s for s in self.all if s.backbone.fingerprint == fingerprint), self.first)
            may_load = self.backbones.may_load(name.id) and not _is_stored(self.repository, name)
            if may_load or self.backbones.reserves(name.id):
                raise InvalidTask(f"{name.id!r} is the name of a backbone; choose another id")
            before = self._roster.owner(name)
            if before is not None and before is not own:
                raise Conflict(f"task {name.id!r} is one of backbone {before.backbone.name!r}; delete it first")
            stored = own.changes.put(name, file, if_match)
            self.owned.look(name)
            return stored


def by_name(services: Services) -> Mapping[str, Service]:
    """Those that take queries, by the names of their backbones."""
    return {service.backbone.name: service for service in services.all}


def _tidy(repository: TaskRepository) -> None:
    """What can wait for a better time is no reason not to serve, as on a full disk."""
    for what, work in (
        ("unused task files were not removed", repository.collect),
        ("counts of queries were not aged", partial(repository.age_uses, AGEING)),
    ):
        try:
            work()
        except InvalidInput:  # the storage is another catalogue's
            raise
        except Exception as error:  # the collector tries again
            log.exception("%s: %s", what, error)


def _is_stored(repository: TaskRepository, name: TaskName) -> bool:
    """A task that was there before the backbone of its name goes on."""
    try:
        repository.get(name.id, name.tenant)
    except NotFound:
        return False
    return True
