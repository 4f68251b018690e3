"""Several backbones in one server: a service for each, behind one door. A task's own backbone says who serves it."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, NamedTuple

from jpets.engine.group.readers import Readers
from jpets.engine.interface import Progress, Serves, submit_parts
from jpets.engine.results.stats import BatchObserver
from jpets.engine.tasks.entries import Tier
from jpets.errors import SHUTTING_DOWN, Conflict, InvalidTask, JpetsError, NotFound, Saturated
from jpets.free_memory import return_free_memory
from jpets.types import BackboneRef, Head, LoadedBackbone, Query, Result, Task
from serving.hosted.engine_metrics import Counted, counted
from serving.hosted.follower import Follower
from serving.hosted.locks import NamedLocks
from serving.hosted.repository import StoredTask, TaskRepository
from serving.hosted.service import MakeEngine, Preparation, Service
from serving.hosted.usage import AGEING

log = logging.getLogger(__name__)

State = Literal["available", "starting", "ready", "draining", "failed"]
POLL = 0.02
OpenBackbone = Callable[[str, Callable[[], Sequence[Serves]]], tuple[Service, MakeEngine]]
"""From a name, and what tells the engines that are there already, to a service that has not started."""


class Hosted(NamedTuple):
    """A backbone that is served, or that could be."""

    name: str
    state: State
    service: Service | None = None
    problem: str | None = None


class Services:
    """``first`` is there from the start to the end; others come and go.

    ``available`` names those that ``open_backbone`` can make; ``backbone_of`` says which one (fingerprint) a task file
    is for; ``share_memory`` says to engines what each may take when one came or went. The plain form of another
    backbone is asked as a task of its name. Methods block; thread-safe.
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
        self._available = available
        self._open = open_backbone
        self._backbone_of = backbone_of
        self._share_memory = share_memory
        self._grace = grace
        self._lock = threading.RLock()  # a signal's handler may come upon itself
        self._loading = threading.Lock()
        """One backbone starts at a time: the next is to see what memory it takes."""
        self._promised = False
        """The memory that is left is for one that starts."""
        self._readers = Readers()
        """Who looks a service up and uses it."""
        self._locks = NamedLocks()
        self._hosted: dict[str, Hosted] = {}
        """The others, in whatever state."""
        self._serving: tuple[Service, ...] = (first,)
        """Those that take queries; a new tuple whenever one comes or goes."""
        self._observers: list[BatchObserver] = []
        self._gone: Counted = Counter()
        self._follower = Follower(self.refresh)
        self._closing = False

    @property
    def all(self) -> Sequence[Service]:
        """Those that take queries."""
        return self._serving

    @property
    def repository(self) -> TaskRepository:
        return self.first.repository

    @property
    def backbone(self) -> LoadedBackbone:
        """The one that queries without a model are for."""
        return self.first.backbone

    @property
    def phase(self) -> tuple[str, int, int]:
        return self.first.phase

    @property
    def ready(self) -> bool:
        """Whether the first backbone is; another one says so for itself."""
        return self.first.ready

    @property
    def live(self) -> bool:
        return all(service.live for service in self._serving)

    @property
    def unreadable(self) -> int:
        return sum(service.unreadable for service in self._serving)

    @property
    def _engines(self) -> Sequence[Serves]:
        """All that take memory, whatever their state."""
        with self._lock:
            others = [hosted.service for hosted in self._hosted.values() if hosted.service is not None]
        return _engines_of(self.first, *others)

    @property
    def started(self) -> Sequence[Serves]:
        """The engines that there are, also while they drain."""
        return _engines_of(*self._serving)

    def counted(self) -> tuple[Sequence[Serves], Counted]:
        """The engines whose counters count, and what those counted that have gone."""
        with self._lock:
            others = [each.service for each in self._hosted.values() if each.state in ("ready", "draining")]
            services = (service for service in others if service is not None)
            return _engines_of(self.first, *services), Counter(self._gone)

    def check_open(self) -> None:
        """Raises ``Saturated`` before the start is done, and once it drains."""
        self.first.check_open()

    def start(self, make_engine: MakeEngine, progress: Progress = lambda what, done, total: None) -> None:
        self.repository.collect()
        self.repository.age_uses(AGEING)
        self.first.start(make_engine, progress)
        for name in self.repository.backbones():
            try:
                self.load(name)
            except JpetsError as error:
                log.warning("a backbone that was loaded before is not: %s", error.message, extra={"backbone": name})
        self._follower.start()

    def refresh(self) -> None:
        """``Service.refresh`` of every backbone that takes queries."""
        with self._readers.reading():
            for service in () if self._closing else self._serving:
                service.refresh()

    @property
    def seen_age(self) -> float | None:
        """Seconds since changes of others in the repository were looked for; None before the first time."""
        return self._follower.age

    def drain(self) -> None:
        """Refuses new requests; those that run are answered."""
        with self._lock:
            self._closing = True
        for service in self._serving:
            service.drain()

    def close(self) -> None:
        self.drain()
        with contextlib.ExitStack() as closing:
            for service in self._serving:
                closing.callback(service.close)
            closing.callback(self._follower.close)

    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch of every backbone."""
        self._observers.append(observer)
        for service in self._serving:
            service.observe(observer)

    def submit(self, queries: Sequence[Query], *, deadline: float | None = None) -> list[Future[Result]]:
        """``Serves.submit``: queries of one backbone reach its engine together."""
        self.check_open()
        with self._readers.reading():
            if len(self._serving) == 1:
                return self.first.engine.submit(queries, deadline=deadline)
            routed: dict[Service, list[int]] = defaultdict(list)
            for at, query in enumerate(queries):
                routed[self._owner(query.task) or self.first].append(at)
            return submit_parts(queries, routed, lambda service, some: service.engine.submit(some, deadline=deadline))

    def find(self, model: str) -> Task | None:
        """The outline of the task that queries for ``model`` get, or None where that is the first backbone's name.

        Raises ``NotFound``.
        """
        with self._readers.reading():
            return (self._owner(model) or self.first).find(model)

    def at_hand(self, model: str) -> bool:
        """Whether ``find`` has to read nothing."""
        with self._readers.reading():
            return (self._owner(model) or self.first).at_hand(model)

    def knows(self, task: str) -> bool:
        """Whether queries may ask for it."""
        return self._owner(task) is not None

    def version(self, task: str) -> int | None:
        """The version that queries get; None for what is not known."""
        return (self._owner(task) or self.first).version(task)

    def preparation(self, task: str) -> Preparation | None:
        """``Service.preparation`` of the task's backbone."""
        found = (service.preparation(task) for service in self._serving)
        return next((each for each in found if each is not None), None)

    def tier(self, task: str) -> Tier | None:
        """Where a task is now; None for what is not known."""
        return (self._owner(task) or self.first).tier(task)

    def devices(self, task: str) -> Sequence[int]:
        """The numbers of the devices that serve a task."""
        return (self._owner(task) or self.first).devices(task)

    def put_task(self, id: str, file: Path, if_match: int | None = None) -> StoredTask:
        """``Service.put_task`` of the backbone that the file is for."""
        fingerprint = self._backbone_of(file) if len(self._serving) > 1 else None
        with self._locks.hold(id), self._readers.reading():
            own = next((s for s in self._serving if s.backbone.fingerprint == fingerprint), self.first)
            if id == self.first.backbone.name or id in self._hosted:
                raise InvalidTask(f"{id!r} is the name of a backbone; choose another id")
            before = self._owner(id)
            if before is not None and before is not own:
                raise Conflict(f"task {id!r} is one of backbone {before.backbone.name!r}; delete it first")
            return own.put_task(id, file, if_match)

    def rollback(self, id: str, to: int | str | None = None) -> StoredTask:
        """``Service.rollback`` of the task's backbone."""
        with self._locks.hold(id), self._readers.reading():
            return (self._owner(id) or self.first).rollback(id, to)

    def delete_task(self, id: str, if_match: int | None = None) -> None:
        """``Service.delete_task`` of the task's backbone."""
        with self._locks.hold(id), self._readers.reading():
            (self._owner(id) or self.first).delete_task(id, if_match)

    def backbones(self) -> list[Hosted]:
        """The first, the others that are loaded, and those that may be."""
        with self._lock:
            hosted = dict(self._hosted)
        first = Hosted(self.first.backbone.name, _state(self.first), self.first)
        rest = [name for name in self._available() if name not in hosted and name != first.name]
        return [first, *hosted.values(), *(Hosted(name, "available") for name in rest)]

    def load(self, name: str) -> Hosted:
        """Starts serving another backbone with every task that the repository has for it; returns at once.

        Once it is ready, the next start loads it again. Raises ``NotFound`` where there is none of that name to load,
        ``Conflict`` where a task has its name.
        """
        self.check_open()
        with self._lock:
            known = self._hosted.get(name)
            if name == self.first.backbone.name:
                return Hosted(name, _state(self.first), self.first)
            if known is not None and known.state == "draining":
                raise Conflict(f"backbone {name!r} is being unloaded; try again when it is")
            if known is not None and known.state != "failed":
                return known
            if self._open is None or name not in self._available():
                raise NotFound(f"no backbone {name[:128]!r} to load; GET /v1/backbones lists what there is")
            if self.knows(name):
                raise Conflict(f"a task has the name {name!r}; delete it first")
            started = self._hosted[name] = Hosted(name, "starting")
        threading.Thread(target=self._start, args=(name,), name="jpets-load", daemon=True).start()
        return started

    def unload(self, name: str) -> None:
        """Stops serving a backbone: running queries of its tasks are answered, within the time of grace, and new ones
        are not found. Its memory is free when this returns.

        Raises ``NotFound``, ``Conflict`` for the first one and for one that is starting.
        """
        if name == self.first.backbone.name:
            raise Conflict(f"{name!r} is the backbone that the server was started with; it stays")
        with self._lock:
            hosted = self._hosted.get(name)
            if hosted is None:
                raise NotFound(f"backbone {name[:128]!r} is not loaded")
            if hosted.state == "failed":
                self.repository.forget_backbone(name)
                del self._hosted[name]
                return
            if hosted.state != "ready" or hosted.service is None:
                raise Conflict(f"backbone {name!r} is {hosted.state}; try again later")
            service = hosted.service
            self.repository.forget_backbone(name)
            self._hosted[name] = hosted._replace(state="draining")
        try:
            with contextlib.ExitStack() as last_first:
                last_first.callback(self._count_gone, name, service)
                last_first.callback(service.close)
                self._withdraw(service)
                end = time.monotonic() + self._grace
                while time.monotonic() < end and not _idle(service):
                    time.sleep(POLL)
        except Exception:  # it is withdrawn all the same: it must not look as if it drained for ever
            log.exception("a backbone did not close well", extra={"backbone": name})
        del hosted, service
        self._free()

    def _count_gone(self, name: str, service: Service) -> None:
        """Forgets a backbone, and keeps what its engine counted: counters never fall."""
        with self._lock:
            del self._hosted[name]
            if service.started is not None:
                self._gone.update(counted(service.started))

    def _start(self, name: str) -> None:
        problem = ""
        with self._loading:
            self._promise(True)
            try:
                self._serve(name)
            except Exception as error:
                log.exception("a backbone could not be loaded", extra={"backbone": name})
                problem = error.message if isinstance(error, JpetsError) else type(error).__name__
            finally:
                self._promise(False)
            if problem:
                with self._lock:
                    self._hosted[name] = Hosted(name, "failed", None, problem)
                self._free()
                return
            try:
                self._share()
            finally:
                with self._lock:  # from now on it may be unloaded
                    self._hosted[name] = self._hosted[name]._replace(state="ready")

    def _serve(self, name: str) -> None:
        """Starts a backbone and shows it to queries. On any error nothing is left of it."""
        assert self._open is not None
        service, make_engine = self._open(name, lambda: self._engines)
        own = service.backbone
        if own.name != name:
            raise Conflict(f"the backbone in {name!r} calls itself {own.name!r}; rename its folder")
        if (same := next((s for s in self.all if s.backbone.fingerprint == own.fingerprint), None)) is not None:
            raise Conflict(f"{name!r} is the same backbone as {same.backbone.name!r}, which is served already")
        with self._lock:
            self._hosted[name] = Hosted(name, "starting", service)
        for observer in self._observers:
            service.observe(observer)
        service.start(make_engine)
        try:
            service.engine.add_task(_plain(own), version=1)
            service.refresh()
            with self._lock:
                if self._closing:
                    raise Saturated(SHUTTING_DOWN)
                self._serving = (*self._serving, service)
            self._readers.settle()
            service.refresh()  # what was changed by those who did not see it yet
            self.repository.keep_backbone(name)
        except BaseException:
            if not self._closing or service not in self._serving:  # else it is closed with the others
                self._withdraw(service)
                service.close()
            raise

    def _withdraw(self, service: Service) -> None:
        """No new query finds it; whoever found it has submitted when this returns."""
        with self._lock:
            self._serving = tuple(each for each in self._serving if each is not service)
        self._readers.settle()

    def _free(self) -> None:
        """An engine's parts know each other: only the collector finds that nobody else does."""
        gc.collect()
        return_free_memory()
        self._share()

    def _promise(self, promised: bool) -> None:
        with self._lock:
            self._promised = promised

    def _share(self) -> None:
        """What is left of the memory is for all, unless one starts that was promised it."""
        with self._lock:
            if not self._promised:
                self._share_memory(self._engines)

    def _owner(self, task: str | None) -> Service | None:
        if task is None:
            return self.first
        return next((service for service in self._serving if service.knows(task)), None)


def _plain(backbone: LoadedBackbone) -> Task:
    """A backbone without any delta, as a task of its name."""
    rule = backbone.embeds
    head = Head("embedding", pooling=rule.pooling, normalize=rule.normalize)
    return Task(backbone.name, BackboneRef.of(backbone), (), head, preprocessing=rule.preprocessing)


def _engines_of(*services: Service) -> list[Serves]:
    return [engine for service in services if (engine := service.started) is not None]


def _state(service: Service) -> State:
    if service.ready:
        return "ready"
    return "starting" if service.started is None else "draining"


def _idle(service: Service) -> bool:
    engine = service.started
    return engine is None or engine.report().idle
