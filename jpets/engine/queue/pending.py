"""A query between submit and answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from jpets.engine.batch.rows import Row
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.sorts import Sort, sort_of
from jpets.types import Query, Result


@dataclass(eq=False)
class SharedText:
    """The text of several queries of one submission, whose tasks do not differ in the first ``layers`` layers."""

    layers: int
    asked: bool = False
    """Whether the best program for them was asked for."""
    pays: tuple[object, bool] | None = None
    """Whether a batch of their own was found to take less time, among which programs."""


@dataclass(eq=False)
class Pending:
    """One query on its way. Times are ``time.monotonic`` seconds.

    A *cold* query waits for its task to come to the device. It has an ``absent`` entry and a ``query`` in place of a
    resident, and a row that stands in for its own.
    """

    task: str | None
    resident: Resident | None
    row: Row
    deadline: float | None
    priority: int
    tenant: str
    future: Future[Result] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=itertools.count().__next__)
    """A number, unique in the process: the earlier query has the lower one."""
    ended: bool = False
    """Whether it is answered, or has no client any more."""
    keep: Callable[[Result], None] | None = None
    """Gets the result before the caller does, as the caller may change it."""
    absent: Entry | None = None
    query: Query | None = None
    text: SharedText | None = None
    queued: bool = False
    """Whether it was put into a queue: from then on only its answer releases its task."""

    @property
    def cold(self) -> bool:
        return self.absent is not None

    @property
    def tokens(self) -> int:
        return self.row.length

    @property
    def sort(self) -> Sort:
        """The sort of its task; for the bare backbone that without classes."""
        return self.resident.sort if self.resident is not None else sort_of(self.row.slots)

    @property
    def party(self) -> tuple[int, str]:
        """Its priority and tenant, among which batches are shared fairly."""
        return self.priority, self.tenant
