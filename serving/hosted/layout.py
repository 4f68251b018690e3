"""What a server has to know of a stored task before it reads it: the classes of its deltas and head."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jpets.deltas.protocol import ClassKey
from jpets.engine.device.classes import LOWERING
from jpets.engine.workloads.registry import network_of
from jpets.errors import JpetsError
from jpets.types import LoadedBackbone, Progress, Task, TaskName
from serving.hosted.repository import IndexedTask, TaskRepository, Validator, named, stored_as

log = logging.getLogger(__name__)

AT_ONCE = 256
"""Layouts that are stored together."""


class Known(NamedTuple):
    """A served task and its classes; None where it cannot be read."""

    name: TaskName
    version: int
    classes: tuple[ClassKey, ...] | None


class Layouts:
    """The classes of a repository's tasks on one backbone. Each task is read for them only once."""

    def __init__(self, repository: TaskRepository, backbone: LoadedBackbone, validator: Validator) -> None:
        self._repository = repository
        self._validator = validator
        self._backbone = backbone.fingerprint
        self._network = network_of(backbone)
        self._params = dict(backbone.params)
        self._maker = f"jpets {LOWERING} {backbone.fingerprint}"

    def keep(self, digest: str, classes: Sequence[ClassKey]) -> None:
        """Stores the classes of a task with a file of this digest."""
        self._repository.keep_layouts(self._maker, {digest: _write(classes)})

    def tasks(self, progress: Progress) -> list[Known]:
        """Every served task of the backbone, the most used first."""
        indexed = [task for task in self._repository.index(self._maker) if task.backbone == self._backbone]
        new = {task.digest: task for task in indexed if task.layout is None}
        made = self._make(new.values(), progress)
        return [Known(named(task.id), task.version, _read(task.layout or made.get(task.digest))) for task in indexed]

    def known(self, name: TaskName) -> Known | None:
        """The task that the repository holds under ``name`` now; None where there is none, or one of another backbone.

        Its classes are also None where it was not read for them yet.
        """
        task = self._repository.indexed(stored_as(name), self._maker)
        if task is None or task.backbone != self._backbone:
            return None
        return Known(name, task.version, _read(task.layout))

    def _make(self, tasks: Iterable[IndexedTask], progress: Progress) -> dict[str, str]:
        """The layouts, by digest, of the tasks that can be read."""
        wanted = list(tasks)
        made: dict[str, str] = {}
        for first in range(0, len(wanted), AT_ONCE):
            progress("new tasks", first, len(wanted))
            some = {task.digest: self._read_layout(task) for task in wanted[first : first + AT_ONCE]}
            found = {digest: layout for digest, layout in some.items() if layout is not None}
            self._repository.keep_layouts(self._maker, found)
            made |= found
        if wanted:
            progress("new tasks", len(wanted), len(wanted))
        return made

    def _read_layout(self, stored: IndexedTask) -> str | None:
        try:
            return _write(self.classes(self._validator(self._repository.read(stored), stored.id)))
        except JpetsError as error:
            log.error("task cannot be read", extra={"task": stored.id, "version": stored.version, "why": error.code})
            return None

    def classes(self, task: Task) -> tuple[ClassKey, ...]:
        """Raises ``InvalidTask``."""
        return self._network.classes(task, self._params)


def _write(classes: Sequence[ClassKey]) -> str:
    return json.dumps([dataclasses.asdict(key) for key in classes])


@functools.lru_cache(maxsize=4096)
def _read(layout: str | None) -> tuple[ClassKey, ...] | None:
    if layout is None:
        return None
    return tuple(map(ClassKey.from_dict, json.loads(layout)))
