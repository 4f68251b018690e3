"""Loads and unloads further backbones while others are served, and has them share the device's memory."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jpets.engine.interface import Serves
from jpets.errors import Conflict, JpetsError, NotFound
from jpets.free_memory import collect_all, return_free_memory
from jpets.types import BackboneRef, Head, LoadedBackbone, Task, TaskName
from serving.hosted.engine_metrics import Counted, counted
from serving.hosted.owned import OwnedTasks
from serving.hosted.roster import Roster
from serving.hosted.service import MakeEngine, Service

log = logging.getLogger(__name__)

State = Literal["available", "starting", "ready", "draining", "failed"]
POLL = 0.02
LOOKING = 5.0
"""Seconds that unloading waits for readers that still have an engine in their hands, such as a scrape of metrics."""
OpenBackbone = Callable[[str, Callable[[], Sequence[Serves]]], tuple[Service, MakeEngine]]
"""(name, a function that gives the engines already there) -> a service that has not started, and what makes its
engine."""


class Hosted(NamedTuple):
    """A backbone that is served, or that could be."""

    name: str
    state: State
    service: Service | None = None
    problem: str | None = None


class Backbones:
    """The backbones beside the first one. The plain form of each is a task of its name.

    ``available`` names those that ``open_backbone`` can make; ``share_memory`` tells engines what each may take when
    a backbone came or went. Methods block; thread-safe.
    """

    def __init__(
        self,
        roster: Roster,
        owned: OwnedTasks,
        available: Callable[[], Sequence[str]],
        open_backbone: OpenBackbone | None,
        share_memory: Callable[[Sequence[Serves]], None],
        grace: float,
    ) -> None:
        self._roster = roster
        self._owned = owned
        self._available = available
        self._open = open_backbone
        self._share_memory = share_memory
        self._grace = grace
        self._repository = roster.first.repository
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        """One backbone starts at a time: the next is to see what memory it takes."""
        self._promised = False
        """The memory that is left is promised to a backbone that starts."""
        self._hosted: dict[str, Hosted] = {}
        """All but the first, in any state."""
        self._gone: Counted = Counter()

    @property
    def engines(self) -> Sequence[Serves]:
        """All that take memory, in any state."""
        with self._lock:
            others = [hosted.service for hosted in self._hosted.values() if hosted.service is not None]
        return engines_of(self._roster.first, *others)

    def counted(self) -> tuple[Sequence[Serves], Counted]:
        """The engines that are counted, and the counts of unloaded backbones' engines."""
        with self._lock:
            others = [each.service for each in self._hosted.values() if each.state in ("ready", "draining")]
            services = (service for service in others if service is not None)
            return engines_of(self._roster.first, *services), Counter(self._gone)

    def named(self, name: str) -> bool:
        """Whether a backbone of this name is served, or was to be served."""
        return name == self._roster.first.backbone.name or name in self._hosted

    def reserves(self, name: str) -> bool:
        """``named``, or whether another server has loaded one of this name. Blocks."""
        return self.named(name) or name in self._repository.backbones()

    def may_load(self, name: str) -> bool:
        """Whether there is a backbone of this name, loaded or not. Blocks."""
        return name in self._available()

    def list(self) -> list[Hosted]:
        """The first, the others that are loaded, and those that may be loaded."""
        with self._lock:
            hosted = dict(self._hosted)
        first = self._first()
        rest = [name for name in self._available() if name not in hosted and name != first.name]
        return [first, *hosted.values(), *(Hosted(name, "available") for name in rest)]

    def load_kept(self) -> None:
        """Loads the backbones that were loaded at the last end."""
        for name in self._repository.backbones():
            try:
                self.load(name)
            except JpetsError as error:
                log.warning("a backbone that was loaded before is not: %s", error.message, extra={"backbone": name})

    def load(self, name: str) -> Hosted:
        """Starts serving another backbone with every task that the repository has for it; returns at once.

        Once it is ready, the next start loads it again. Raises ``NotFound`` where there is none of that name to load,
        ``Conflict`` where a task has its name.
        """
        self._roster.first.check_open()
        with self._lock:
            known = self._hosted.get(name)
            if name == self._roster.first.backbone.name:
                return self._first()
            if known is not None and known.state == "draining":
                raise Conflict(f"backbone {name!r} is being unloaded; try again when it is")
            if known is not None and known.state != "failed":
                return known
            if self._open is None or name not in self._available():
                raise NotFound(f"no backbone {name[:128]!r} to load; GET /v1/backbones lists what there is")
            if self._roster.owner(TaskName.of(name)) is not None or self._owned.has_id(name):
                raise Conflict(f"a task has the name {name!r}; delete it first")
            started = self._hosted[name] = Hosted(name, "starting")
        threading.Thread(target=self._start, args=(name,), name="jpets-load", daemon=True).start()
        return started

    def unload(self, name: str) -> None:
        """Stops serving a backbone: running queries of its tasks are answered, within the time of grace, and new ones
        are not found. Its memory is free when this returns.

        Raises ``NotFound``, ``Conflict`` for the first one and for one that is starting.
        """
        if name == self._roster.first.backbone.name:
            raise Conflict(f"{name!r} is the backbone that the server was started with; it stays")
        with self._lock:
            hosted = self._hosted.get(name)
            if hosted is None:
                raise NotFound(f"backbone {name[:128]!r} is not loaded")
            if hosted.state == "failed":
                self._repository.forget_backbone(name)
                del self._hosted[name]
                return
            if hosted.state != "ready" or hosted.service is None:
                raise Conflict(f"backbone {name!r} is {hosted.state}; try again later")
            service = hosted.service
            self._repository.forget_backbone(name)
            self._hosted[name] = hosted._replace(state="draining")
        try:
            with contextlib.ExitStack() as last_first:
                last_first.callback(self._count_gone, name, service)
                last_first.callback(service.close)
                self._roster.withdraw(service)
                end = time.monotonic() + self._grace
                while time.monotonic() < end and not _idle(service):
                    time.sleep(POLL)
        except Exception:  # withdrawn all the same, or it would look as if it drained for ever
            log.exception("a backbone did not close well", extra={"backbone": name})
        gone = _engine_of(hosted)
        del hosted, service
        self._free(gone)

    def _first(self) -> Hosted:
        first = self._roster.first
        return Hosted(first.backbone.name, _state(first), first)

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
                    gone = _engine_of(self._hosted[name])
                    self._hosted[name] = Hosted(name, "failed", None, problem)
                self._free(gone)
                return
            try:
                self._share()
            finally:
                with self._lock:  # from now on it may be unloaded
                    self._hosted[name] = self._hosted[name]._replace(state="ready")

    def _serve(self, name: str) -> None:
        """Starts a backbone and shows it to queries. On any error nothing of it is left."""
        assert self._open is not None
        service, make_engine = self._open(name, lambda: self.engines)
        own, roster = service.backbone, self._roster
        if own.name != name:
            raise Conflict(f"the backbone in {name!r} calls itself {own.name!r}; rename its folder")
        if (same := next((s for s in roster.all if s.backbone.fingerprint == own.fingerprint), None)) is not None:
            raise Conflict(f"{name!r} is the same backbone as {same.backbone.name!r}, which is served already")
        with self._lock:
            self._hosted[name] = Hosted(name, "starting", service)
        roster.watch(service)
        service.start(make_engine)
        try:
            service.engine.add_task(_plain(own), version=1)
            service.following.refresh()
            roster.add(service)
            service.following.refresh()  # changes that other services made before they saw this one
            self._repository.keep_backbone(name)
        except BaseException:
            if not roster.closing or service not in roster.all:  # otherwise it is closed with the others
                roster.withdraw(service)
                service.close()
            raise

    def _free(self, gone: weakref.ref[Serves] | None) -> None:
        """An engine's parts know each other: only the garbage collector finds that nothing else refers to them. Each
        collection stops all threads, so they become rarer."""
        waited, pause = 0.0, POLL
        collect_all()
        while gone is not None and gone() is not None and waited < LOOKING:  # not counting what collections take
            time.sleep(pause)
            waited += pause
            pause *= 2
            collect_all()
        if gone is not None and gone() is not None:
            log.warning("an unloaded backbone's engine is still in use: its memory is not free yet")
        return_free_memory()
        self._share()

    def _promise(self, promised: bool) -> None:
        with self._lock:
            self._promised = promised

    def _share(self) -> None:
        """What is left of the memory is for all, unless a backbone that starts was promised it."""
        with self._lock:
            if not self._promised:
                self._share_memory(self.engines)


def engines_of(*services: Service) -> list[Serves]:
    """The engines of the services that have one."""
    return [engine for service in services if (engine := service.started) is not None]


def _engine_of(hosted: Hosted) -> weakref.ref[Serves] | None:
    engine = None if hosted.service is None else hosted.service.started
    return None if engine is None else weakref.ref(engine)


def _plain(backbone: LoadedBackbone) -> Task:
    """A backbone without any delta, as a task of its name."""
    rule = backbone.embeds
    head = Head("embedding", pooling=rule.pooling, normalize=rule.normalize)
    return Task(backbone.name, BackboneRef.of(backbone), (), head, preprocessing=rule.preprocessing)


def _state(service: Service) -> State:
    if service.ready:
        return "ready"
    return "starting" if service.started is None else "draining"


def _idle(service: Service) -> bool:
    engine = service.started
    return engine is None or engine.report().idle
