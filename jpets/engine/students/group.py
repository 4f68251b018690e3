"""One group as the engine knows it: the ids of its students, and what reads them."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.engine.tasks.student_names import student_ids
from jpets.errors import InvalidTask
from jpets.types import Query, Result, Task, TaskName

TIERS: Sequence[Tier] = ("device", "host", "repository")
"""The nearest first."""
Found = Task | BaseException
"""What a reading finds of a student, or why it fails."""


@dataclasses.dataclass(eq=False)
class Group:
    """A version of a group. ``ids`` name its students in the engine, the first one first: no task of a user has such an
    id, and no other version of the group the same ones."""

    entry: Entry
    ids: tuple[str, ...]
    number: int = 0
    """Of all versions of groups in the process."""
    least: int = 1
    """Students that a query gets at least."""
    outline: Task | None = None
    """The group without its deltas, once it was read."""
    asked: int = 0
    """Queries that have no answer yet."""
    leaving: bool = False
    """Whether no new query gets it."""
    wanted: int = 0
    """How many students, the first ones, queries wait for."""
    warming: set[int] = dataclasses.field(default_factory=set)
    """Students that are to come before a query asks for them."""
    reading: Future[Sequence[Found]] | None = None
    """Of each student, while its file is read."""
    seconds: float = 0.0
    """What reading its file took the last time."""

    def queries(self, query: Query, count: int) -> list[Query]:
        """The query for each of the first ``count`` students, or of the ``least`` that may answer."""
        return [dataclasses.replace(query, task=id) for id in self.ids[: max(count, self.least)]]

    def awaits(self, at: int) -> bool:
        """Whether a student is to come to memory."""
        return at < self.wanted or at in self.warming

    def read(self) -> Sequence[Task]:
        """All its students, from its file. One thread at a time.

        Raises what its loader does; ``InvalidTask`` for a file that is not that of the students read before.
        """
        began = time.monotonic()
        task = self.entry.load()
        self.seconds = time.monotonic() - began
        parts = task.parts
        if task.students is None or len(parts) != len(self.ids):
            raise InvalidTask(f"task {task.id!r} was a group of {len(self.ids)} students, found {len(parts)}")
        outline = dataclasses.replace(task, deltas=())
        if self.outline is not None and not _alike(self.outline, outline):
            raise InvalidTask(f"task {task.id!r} has changed since its first student was read; upload it again")
        self.outline = outline
        self.least = task.students.least
        return [dataclasses.replace(part, id=id) for part, id in zip(parts, self.ids, strict=True)]

    def place(self, at: int, devices: int) -> int:
        """The device of a student, by number modulo the number of ``devices`` (equation 6, and one further with each
        turn of them: where groups have as many students as there are devices, the first ones, which answer most, would
        all share a device)."""
        start = self.number * len(self.ids)
        return at + start + start // devices

    def reworded(self, result: Result) -> Result:
        """A student's result by the name of the group."""
        if result.error is None:
            return result
        told = result.error.message
        for id in self.ids:
            told = told.replace(id, self.entry.task)
        return dataclasses.replace(result, error=type(result.error)(told))


def group_of(
    name: TaskName, load: Callable[[], Task], version: int | None, students: int, number: int, least: int = 1
) -> Group:
    """``number`` tells this version from any other one of the process."""
    entry = Entry(name.tenant, name.id, load, version)
    return Group(entry, student_ids(name.id, number, students), number, least)


def _alike(one: Task, other: Task) -> bool:
    """Whether two readings of a group have the same head and multipliers."""
    if (
        one.students != other.students
        or one.labels != other.labels
        or one.head.tensors.keys() != other.head.tensors.keys()
    ):
        return False
    return all(np.array_equal(array, other.head.tensors[name]) for name, array in one.head.tensors.items())


def with_id(task: LoweredTask, id: str) -> LoweredTask:
    """The same task by another name."""
    own, folded = (dataclasses.replace(each, id=id) for each in (task.task, task.folded))
    return dataclasses.replace(task, task=own, folded=folded)


def kept_scores(groups: Iterable[Group]) -> dict[int, float]:
    """By number of students, the mean share of the teacher's score that groups keep on the texts by which they were
    judged: of those that were read and say both, by a measure of which more is better."""
    found = defaultdict[int, list[float]](list)
    for group in groups:
        made = group.outline.students if group.outline is not None else None
        if made is None or made.metric == "rmse" or made.teacher_score is None or made.teacher_score <= 0:
            continue
        for size, score in enumerate(made.scores, 1):
            if size >= made.least:
                found[size].append(score / made.teacher_score)
    return {size: float(np.mean(shares)) for size, shares in sorted(found.items())}
