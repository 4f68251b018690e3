"""Keeps an engine in step with what others change in the repository of its tasks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from jpets.engine.interface import Serves
from jpets.errors import JpetsError
from jpets.types import Progress, TaskName
from serving.hosted.layout import Known
from serving.hosted.preparations import SOON, Preparations
from serving.hosted.served import ServedTasks

log = logging.getLogger(__name__)


class Following:
    """Tells the engine of ``tasks`` what the repository holds. Methods block; thread-safe."""

    def __init__(self, tasks: ServedTasks, preparations: Preparations) -> None:
        self._tasks = tasks
        self._preparations = preparations
        self._seen = 0
        """The number of the repository's last change that is in ``_changed``, or that the engine knows."""
        self._changed: dict[TaskName, None] = {}
        """Tasks that have to be looked at."""
        self._refreshing = threading.Lock()
        self.wake: Callable[[], None] = lambda: None
        """Is called where ``refresh`` has a task to look at again, of which nobody tells."""
        tasks.follow = self.follow
        preparations.again = self._again

    @property
    def unfinished(self) -> bool:
        """Whether ``refresh`` has a task to look at again."""
        return bool(self._changed)

    def begin(self, progress: Progress) -> list[Known]:
        """Every task of the repository, the most used first; ``refresh`` looks at what changed since."""
        self._seen = self._tasks.repository.last_change()
        return self._tasks.layouts.tasks(progress)

    def refresh(self) -> None:
        """Tells the engine what others than this service changed in the repository since the last call.

        The time it takes grows with the number of changed tasks. A task that this service is changing, or whose change
        fails, is looked at again the next time; such an error is raised behind the others.
        """
        engine = self._tasks.engine
        with self._refreshing:
            number, changed = self._tasks.repository.changes(self._seen)
            if number < self._seen:  # an older copy of the catalogue took its place
                known = self._tasks.layouts.tasks(lambda what, done, total: None)
                changed = [*self._tasks.registered.copy(), *(task.name for task in known)]
            self._changed.update(dict.fromkeys(changed))
            self._seen = number
            problem: Exception | None = None
            until = time.monotonic() + SOON
            for name in list(self._changed):
                try:
                    done = self._follow(engine, name, until)
                except Exception as error:  # noqa: BLE001 (of one task: the others' changes are seen all the same)
                    done, problem = False, error
                if done:
                    del self._changed[name]
            if problem is not None:
                raise problem

    def follow(self, name: TaskName) -> bool:
        """Tells the engine what the repository holds under ``name`` now. False while this service is changing it, or
        reads a new version."""
        until = time.monotonic() + SOON
        return self._tasks.started is not None and self._follow(self._tasks.started, name, until)

    def bring_up(self, engine: Serves, name: TaskName, until: float = 0.0) -> bool:
        """``follow`` by a caller that holds the task's lock, and waits for a version to be read until then
        (``time.monotonic``). False where it has to be looked at again."""
        tasks, preparations = self._tasks, self._preparations
        known, version = tasks.layouts.known(name), tasks.version(name)
        if known is None:
            preparations.forget(engine, name)
        elif (waits := preparations.get(name)) is not None and waits.version == known.version:
            return True
        elif version is not None and name not in tasks.registered:
            log.warning("a stored task has the name of a backbone, which goes before it", extra={"task": name.id})
        elif waits is None or waits.coming or version != known.version:  # else an update failed: it is told
            preparations.drop(name)
            if version != known.version:
                return preparations.take(engine, self._with_layout(known), until)
            preparations.not_read(name)
        return True

    def _follow(self, engine: Serves, name: TaskName, until: float) -> bool:
        with self._tasks.locks.attempt(name) as held:
            return held and self.bring_up(engine, name, until)

    def _again(self, name: TaskName) -> None:
        with self._refreshing:
            self._changed[name] = None
        self.wake()

    def _with_layout(self, known: Known) -> Known:
        """The task with its layout, which is read where that was not done yet. Without a layout where it cannot be
        read: its queries are told why."""
        if known.layout is None and self._preparations.growing:
            with contextlib.suppress(JpetsError):
                stored = self._tasks.repository.get(known.name.id, known.name.tenant, known.version)
                layout = self._tasks.layouts.layout(self._tasks.read(stored, known.name))
                self._tasks.layouts.keep(stored.digest, layout)
                return known._replace(layout=layout)
        return known
