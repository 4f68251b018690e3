"""The services that take queries now, one for each backbone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from jpets.engine.group.readers import Readers
from jpets.engine.results.stats import BatchObserver
from jpets.errors import SHUTTING_DOWN, Saturated
from jpets.types import TaskName
from serving.hosted.service import Service


class Roster:
    """``first`` is there from the start to the end; other services come and go. Thread-safe."""

    def __init__(self, first: Service, wake: Callable[[], None]) -> None:
        """``wake`` is what each service is to call where it has changes by others to look at again."""
        self.first = first
        first.following.wake = wake
        self._wake = wake
        self.all: Sequence[Service] = (first,)
        """Those that take queries; a new sequence whenever one comes or goes."""
        self.closing = False
        self._lock = threading.RLock()  # a signal's handler may interrupt itself
        self._readers = Readers()
        self._observers: list[BatchObserver] = []

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Every service that is looked up meanwhile stays until the end."""
        return self._readers.reading()

    def owner(self, name: TaskName) -> Service | None:
        """The service that has a task."""
        return next((service for service in self.all if service.tasks.knows(name)), None)

    @contextlib.contextmanager
    def owning(self, name: TaskName) -> Iterator[Service]:
        """The service that has the task, or else the first one; it stays meanwhile."""
        with self.reading():
            yield self.owner(name) or self.first

    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch of every service, also of services that come later."""
        self._observers.append(observer)
        for service in self.all:
            service.observe(observer)

    def watch(self, service: Service) -> None:
        """Observers get the batches of a service that is about to come, and it wakes what follows changes."""
        service.following.wake = self._wake
        for observer in self._observers:
            service.observe(observer)

    def add(self, service: Service) -> None:
        """From now on queries find it; earlier queries have been routed when this returns. Raises
        ``Saturated`` once the roster is closed."""
        with self._lock:
            if self.closing:
                raise Saturated(SHUTTING_DOWN)
            self.all = (*self.all, service)
        self._readers.settle()

    def withdraw(self, service: Service) -> None:
        """No new query finds it; those that found it have been submitted when this returns."""
        with self._lock:
            self.all = tuple(each for each in self.all if each is not service)
        self._readers.settle()

    def close(self) -> None:
        """Services that are here stay; no other service comes."""
        with self._lock:
            self.closing = True
