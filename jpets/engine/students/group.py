"""One group as the engine knows it: the ids of its students, and what reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import InvalidTask
from jpets.types import Query, Task, TaskName

TIERS: Sequence[Tier] = ("device", "host", "repository")
"""The nearest first."""


@dataclasses.dataclass(eq=False)
class Group:
    """A version of a group. ``ids`` name its students in the engine, the first one first: no task of a user has such an
    id, and no other version of the group the same ones."""

    entry: Entry
    ids: tuple[str, ...]
    outline: Task | None = None
    """The group without its deltas, once it was read."""

    def queries(self, query: Query, count: int) -> list[Query]:
        """The query for each of the first ``count`` students."""
        return [dataclasses.replace(query, task=id) for id in self.ids[:count]]

    def loader(self, at: int) -> Callable[[], Task]:
        """What reads one student."""
        return partial(self._load, at)

    def _load(self, at: int) -> Task:
        task = self.entry.load()
        parts = task.parts
        if task.students is None or len(parts) != len(self.ids):
            raise InvalidTask(f"task {task.id!r} was a group of {len(self.ids)} students, found {len(parts)}")
        self.outline = dataclasses.replace(task, deltas=())
        return dataclasses.replace(parts[at], id=self.ids[at])


def group_of(name: TaskName, load: Callable[[], Task], version: int | None, students: int, number: int) -> Group:
    """``number`` tells this version from any other one of the process."""
    ids = tuple(f"{name.id}#{number}.{at + 1}" for at in range(students))
    return Group(Entry(name.tenant, name.id, load, version), ids)


def with_id(task: LoweredTask, id: str) -> LoweredTask:
    """The same task by another name."""
    own, folded = (dataclasses.replace(each, id=id) for each in (task.task, task.folded))
    return dataclasses.replace(task, task=own, folded=folded)
