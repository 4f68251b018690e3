"""What an engine knows of a task, and of a task on its device."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jpets.deltas import class_method
from jpets.deltas.protocol import NO_LEAD, ClassKey, Lead
from jpets.deltas.task_slots import TaskSlots, task_slots
from jpets.engine.tasks.sorts import Sort, sort_of
from jpets.errors import JpetsError
from jpets.types import Pooling, Task

Tier = Literal["device", "host", "repository"]
"""Where a task is."""


class FilePart(abc.ABC):
    """An ``Entry.load`` of one of several tasks in a file, a reading of which serves those that come with it too.
    Thread-safe."""

    @abc.abstractmethod
    def __call__(self) -> Task:
        """Reads the task, or takes what another one's reading found of it."""

    @property
    @abc.abstractmethod
    def seconds(self) -> float:
        """What reading the file took the last time."""

    @abc.abstractmethod
    def settled(self) -> None:
        """The task was to come before a query asks for it: it is there, or does not come."""


class LoadFailure(NamedTuple):
    """Why a task could not be read, and until when that is told its queries without reading it again
    (``time.monotonic``)."""

    error: JpetsError
    turn: int
    until: float


@dataclass(eq=False)
class Entry:
    """A task that an engine knows, on the device or not. ``load`` reads it, in any thread."""

    tenant: str
    task: str
    load: Callable[[], Task]
    version: int | None = None
    pinned: bool = False
    """Whether it never leaves the device for another task."""
    cost: float = 0.0
    """Seconds that it took to bring it the last time."""
    keys: tuple[ClassKey, ...] | None = None
    """The classes of its present version, once known."""
    resident: Resident | None = None
    turn: int = 0
    """Rises with every new version."""
    failure: LoadFailure | None = None
    """Of the latest reading, where that failed."""
    replaced: bool = False
    """Whether something of another kind, as a group of students, took its name when it was removed."""
    loading: object = field(default_factory=object)
    """Differs from that of any other version, and of any other task that ever has its id: ids and versions can
    recur."""

    @property
    def read_seconds(self) -> float:
        """What reading it takes at least, as far as ``load`` knows: its file may have been read for another task."""
        return self.load.seconds if isinstance(self.load, FilePart) else 0.0

    def settled(self) -> None:
        """``FilePart.settled``."""
        if isinstance(self.load, FilePart):
            self.load.settled()


@dataclass(eq=False)
class Resident:
    """A task on the device. It keeps its slots until its last query is answered, also after its removal."""

    tenant: str
    task: Task
    """The task, without the numbers of its deltas if these are not kept in memory."""
    slots: Mapping[ClassKey, int]
    pooling: Pooling
    """The vector that the head on the device reads; not always the task's own (``fold_pooler``)."""
    longest: int
    """Most tokens of a text, without the virtual tokens of the deltas."""
    lead: Lead = NO_LEAD
    version: int | None = None
    queries: int = 0
    removed: bool = False
    """Whether no new query gets it: it was deleted, or replaced by another version or task."""
    entry: Entry | None = None
    rank: tuple[float, int] = (0.0, 0)
    """(rank, number): of tasks without queries, the lowest leaves first; the number rises with every use of any
    task."""
    loading: object = None
    """That of its entry; the response cache finds its answers by it."""
    first_layer: int = 0
    """The first layer where it differs from the backbone."""

    def __post_init__(self) -> None:
        self.slots = task_slots(self.slots)  # made here, for all queries of the task

    @functools.cached_property
    def sort(self) -> Sort:
        return sort_of(self.slots)

    @functools.cached_property
    def copy_slots(self) -> TaskSlots:
        """Its slots that are still needed on a merged copy of the weights."""
        return TaskSlots({key: slot for key, slot in self.slots.items() if not class_method(key.method).in_copies})

    @functools.cached_property
    def mergeable(self) -> bool:
        """Whether a copy of the weights can hold some of its deltas: unless one that stays changes the weights, which
        would then be others."""
        kept = [class_method(key.method) for key in self.copy_slots]
        fixed = all(method.kind == "head" or method.step != "weight" for method in kept)
        return fixed and len(kept) < len(self.slots)

    @property
    def pageable(self) -> bool:
        """Whether it may leave the device for another task: it can be loaded again."""
        return self.entry is not None and not self.entry.pinned

    def whole(self) -> Task:
        """The task with all its numbers."""
        return self.task if self.entry is None else self.entry.load()
