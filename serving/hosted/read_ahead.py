"""Reads versions that others stored, while older ones are served."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

from jpets.engine.interface import Serves
from jpets.engine.tasks.lowered import LoweredTask
from jpets.readers import Readers
from jpets.types import TaskName
from serving.hosted.layout import Known
from serving.hosted.served import ServedTasks

AT_ONCE = 16
"""Versions that are read, or were and wait to be taken: each holds a whole task."""


class ReadAhead:
    """Of each task one version at a time. The caller holds the task's lock."""

    def __init__(self, tasks: ServedTasks) -> None:
        self._tasks = tasks
        self._reading: dict[TaskName, tuple[int, Future[LoweredTask]]] = {}
        self._readers: Readers | None = None

    def read(self, engine: Serves, known: Known, until: float) -> LoweredTask | None:
        """The version, as the engine takes it; None where it is not read by then (``time.monotonic``), or has to wait
        for others. Raises what reading it does."""
        version, done = self._reading.get(known.name, (None, None))
        if done is None or version != known.version:
            self.forget(known.name)
            if len(self._reading) >= AT_ONCE:
                return None
            done = Future()
            self._reading[known.name] = known.version, done
            self._threads.submit(partial(_into, done, partial(self._read, engine, known)))
        if not wait([done], max(0.0, until - time.monotonic())).done:
            return None
        self.forget(known.name)
        return done.result()

    def forget(self, name: TaskName) -> None:
        """What is read of the task is not wanted any more."""
        self._reading.pop(name, None)

    def close(self) -> None:
        if self._readers is not None:
            self._readers.close()

    @property
    def _threads(self) -> Readers:
        if self._readers is None:
            self._readers = Readers()
            self._readers.start()
        return self._readers

    def _read(self, engine: Serves, known: Known) -> LoweredTask:
        name = known.name
        stored = self._tasks.repository.get(name.id, name.tenant, known.version)
        return engine.lower_task(self._tasks.read(stored, name))


def _into(done: Future[LoweredTask], read: Callable[[], LoweredTask]) -> None:
    try:
        done.set_result(read())
    except BaseException as error:  # noqa: BLE001 (it is for who waits)
        done.set_exception(error)
