"""Reads versions that others stored, while older ones are served."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from jpets.engine.interface import Serves
from jpets.engine.tasks.lowered import LoweredTask
from jpets.types import TaskName
from serving.hosted.layout import Known
from serving.hosted.served import ServedTasks

READERS = 4
"""Versions that are read at once: a storage that is slow for one keeps no other waiting."""


class ReadAhead:
    """Of each task one version at a time. The caller holds the task's lock."""

    def __init__(self, tasks: ServedTasks) -> None:
        self._tasks = tasks
        self._reading: dict[TaskName, tuple[int, Future[LoweredTask]]] = {}
        self._readers = ThreadPoolExecutor(READERS, "jpets-versions")

    def read(self, engine: Serves, known: Known, patience: float | None) -> LoweredTask | None:
        """The version, as the engine takes it; None where it is still being read after ``patience`` seconds, of which
        none are spent while others are read too. Raises what reading it does."""
        version, done = self._reading.get(known.name, (None, None))
        if done is None or version != known.version:
            done = self._readers.submit(self._read, engine, known)
            self._reading[known.name] = known.version, done
        if patience is not None and len(self._reading) > READERS:
            patience = 0.0
        if not wait([done], patience).done:
            return None
        self.forget(known.name)
        return done.result()

    def forget(self, name: TaskName) -> None:
        """What is read of the task is not wanted any more."""
        self._reading.pop(name, None)

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _read(self, engine: Serves, known: Known) -> LoweredTask:
        name = known.name
        stored = self._tasks.repository.get(name.id, name.tenant, known.version)
        return engine.lower_task(self._tasks.read(stored, name))
