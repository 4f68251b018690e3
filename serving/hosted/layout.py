"""What a server has to know of a stored task before it reads it: the classes of its deltas and head."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterable
from typing import NamedTuple

from jpets.deltas.protocol import ClassKey
from jpets.engine.device.classes import LOWERING
from jpets.engine.tasks.lowered import LoweredTask
from jpets.engine.workloads.registry import network_of
from jpets.errors import JpetsError
from jpets.types import LoadedBackbone, Progress, Task, TaskName
from serving.hosted.repository import IndexedTask, TaskRepository, Validator

log = logging.getLogger(__name__)

AT_ONCE = 256
"""Layouts that are stored together."""


class Layout(NamedTuple):
    """``classes`` are those that a task needs, as often as it needs a slot of one; ``students`` of a group, else 0, of
    which at least ``least`` answer."""

    classes: tuple[ClassKey, ...]
    students: int = 0
    least: int = 1

    def to_json(self) -> str:
        keys = [dataclasses.asdict(key) for key in self.classes]
        group = {"classes": keys, "students": self.students, "least": self.least}
        return json.dumps(group if self.students else keys)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def from_json(cls, text: str) -> Layout:
        data = json.loads(text)
        group = data if isinstance(data, dict) else {"classes": data}
        return cls(tuple(map(ClassKey.from_dict, group["classes"])), group.get("students", 0), group.get("least", 1))


class Known(NamedTuple):
    """A served task and its layout; None where it cannot be read."""

    name: TaskName
    version: int
    layout: Layout | None

    @property
    def classes(self) -> tuple[ClassKey, ...] | None:
        return self.layout.classes if self.layout is not None else None


class Layouts:
    """The classes of a repository's tasks on one backbone. Each task is read for them only once."""

    def __init__(self, repository: TaskRepository, backbone: LoadedBackbone, validator: Validator) -> None:
        self._repository = repository
        self._validator = validator
        self._backbone = backbone.fingerprint
        self._network = network_of(backbone)
        self._params = dict(backbone.params)
        self._maker = f"jpets {LOWERING} {backbone.fingerprint}"

    def keep(self, digest: str, layout: Layout) -> None:
        """Stores the layout of a task with a file of this digest."""
        maker, text = self.kept(layout)
        self._repository.keep_layouts(maker, {digest: text})

    def kept(self, layout: Layout) -> tuple[str, str]:
        """The maker of layouts, and what is kept of one."""
        return self._maker, layout.to_json()

    def tasks(self, progress: Progress) -> list[Known]:
        """Every served task of the backbone, the most used first."""
        indexed = [task for task in self._repository.index(self._maker) if task.backbone == self._backbone]
        new = {task.digest: task for task in indexed if task.layout is None}
        made = self._make(new.values(), progress)
        return [Known(task.name, task.version, _read(task.layout or made.get(task.digest))) for task in indexed]

    def known(self, name: TaskName) -> Known | None:
        """The task that the repository holds under ``name`` now; None where there is none, or one of another backbone.

        Its layout is also None where it was not read for it yet.
        """
        task = self._repository.indexed(name, self._maker)
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
            return self.layout(self._validator(self._repository.read(stored), stored.id)).to_json()
        except JpetsError as error:
            log.error("task cannot be read", extra={"task": stored.id, "version": stored.version, "why": error.code})
            return None

    def classes(self, task: Task) -> tuple[ClassKey, ...]:
        """Raises ``InvalidTask``."""
        return self._network.classes(task, self._params)

    def layout(self, task: Task) -> Layout:
        """Raises ``InvalidTask``."""
        return _layout(self.classes(task), task)


def _read(layout: str | None) -> Layout | None:
    return Layout.from_json(layout) if layout is not None else None


def layout_of(task: LoweredTask) -> Layout:
    """That of a task which was lowered already."""
    return _layout(task.classes, task.task)


def _layout(classes: tuple[ClassKey, ...], task: Task) -> Layout:
    if (own := task.students) is None:
        return Layout(classes)
    return Layout(classes, len(own.multipliers), own.least)
