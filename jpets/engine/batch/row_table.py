"""The rows of a batch as arrays, in the order in which they are packed. Pure numpy.

Rows are ordered by the set of light classes they use (Gray-code order, so that each class's rows are mostly
neighbours), then by their heavy slots, so that a heavy delta is applied to all rows of a task at once. The order is the
same in every bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jpets.deltas import class_method
from jpets.deltas.protocol import NO_LEAD, ClassKey
from jpets.deltas.task_slots import TaskSlots, numbered_class, task_slots
from jpets.engine.batch.bucket import replaces_weights, windowed
from jpets.engine.batch.rows import Ints, Row

AFTER_ALL = np.iinfo(np.int32).max
KNOWN_SETS = 1024
"""Sets of classes of which the columns are kept: traffic has few."""


class Columns:
    """A column for each class of a batch, in the order of their keys; which of them are of which kind."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """``numbers`` are those of the classes (``class_number``)."""
        by_key = sorted(numbers, key=numbered_class)
        self.keys = tuple(map(numbered_class, by_key))
        self.column = np.zeros(max(numbers, default=0) + 1, np.intp)
        """By class number."""
        self.column[by_key] = np.arange(len(by_key))
        self.at = {key: column for column, key in enumerate(self.keys)}
        self.windowed = np.flatnonzero([windowed(key) for key in self.keys])
        self.heavy = np.flatnonzero([class_method(key.method).kind == "heavy" for key in self.keys])
        self.replacing = tuple(key for key in self.keys if replaces_weights(key))


columns_of = functools.lru_cache(KNOWN_SETS)(Columns)


class RowTable:
    """``rows`` in packing order: ``queries`` are their numbers, ``lengths`` their tokens, ``leads`` how many of these
    are virtual, ``first_positions`` where positions begin, all [N] in that order. ``slots`` [N, classes] has a column
    for each class, 0 where a row does not use it. It never changes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        distinct, owner = _distinct([task_slots(row.slots) for row in rows])
        pairs = [own.pairs for own in distinct]
        numbers, slots = np.concatenate(pairs, axis=1)
        self.columns = columns_of(tuple(np.bincount(numbers).nonzero()[0].tolist()))
        table = np.zeros((len(distinct), len(self.columns.keys)), np.int32)
        sizes = [own.shape[1] for own in pairs]
        table[np.arange(len(distinct)).repeat(sizes), self.columns.column[numbers]] = slots
        if len(distinct) == 1:
            self.queries = np.arange(len(rows), dtype=np.int32)
        else:
            ranks = _ranks(table, np.bincount(owner), self.columns)
            self.queries = ranks[owner].argsort(kind="stable").astype(np.int32)
        self.slots: Ints = table[owner[self.queries]]
        self.lengths = np.array([row.length for row in rows], np.int32)[self.queries]
        leads = [row.lead for row in rows]
        if all(lead is NO_LEAD for lead in leads):
            self.leads, self.first_positions = np.zeros((2, len(rows)), np.int32)
        else:
            own_leads = [(lead.tokens, lead.first_position) for lead in leads]
            self.leads, self.first_positions = np.array(own_leads, np.int32)[self.queries].T

    @functools.cached_property
    def used(self) -> npt.NDArray[np.bool_]:
        """Whether each row uses each class [N, classes]."""
        return self.slots > 0

    @functools.cached_property
    def heavy_tokens(self) -> Mapping[ClassKey, npt.NDArray[np.int_]]:
        """The tokens [tasks] of each task with a heavy delta, by class."""
        keys, heavy = self.columns.keys, self.columns.heavy
        sums = [np.bincount(self.slots[:, column], weights=self.lengths)[1:] for column in heavy]
        return {keys[at]: own[own > 0].astype(np.int_) for at, own in zip(heavy, sums, strict=True)}

    @property
    def replaced(self) -> bool:
        """Whether one class that replaces weights serves every row."""
        return any(map(self.all_use, self.columns.replacing))

    def all_use(self, key: ClassKey) -> bool:
        """Whether every row uses a class."""
        column = self.columns.at.get(key)
        return column is not None and bool(self.used[:, column].all())

    def members(self, key: ClassKey) -> tuple[Ints, Ints]:
        """The places, in packing order, of the rows that use a class, and their slots."""
        column = self.columns.at.get(key)
        if column is None:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        places = self.used[:, column].nonzero()[0].astype(np.int32)
        return places, self.slots[places, column]


def _distinct(used: Sequence[TaskSlots]) -> tuple[list[TaskSlots], npt.NDArray[np.intp]]:
    """The different objects among ``used``, and which of them each is."""
    found = dict(zip(map(id, used), used, strict=True))
    numbers = dict(zip(found, range(len(found)), strict=True))
    return list(found.values()), np.array([numbers[id(own)] for own in used], np.intp)


def _ranks(table: Ints, counts: npt.NDArray[Any], columns: Columns) -> Ints:
    """The packing order of tasks [tasks], equal for tasks of which the rows may stand in any order: ``table`` [tasks,
    classes] are their slots, ``counts`` [tasks] their rows."""
    light = table[:, columns.windowed] > 0
    light = light[:, np.argsort(-(counts @ light), kind="stable")]
    gray = np.logical_xor.accumulate(light, axis=1)  # each bit of a number is the parity of its Gray code's up to there
    keys = np.concatenate([gray, _heavy_keys(table[:, columns.heavy])], axis=1)
    if not keys.shape[1]:
        return np.zeros(len(table), np.int32)
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    ranks = np.zeros(len(table), np.int32)
    ranks[order[1:]] = np.cumsum((ordered[1:] != ordered[:-1]).any(1))
    return ranks


def _heavy_keys(slots: Ints) -> Ints:
    """Numbers [tasks, classes] that order tasks as the sequences of their (class, slot) pairs do: the one that ends
    first comes first, and so does the one with the earlier class."""
    used = slots > 0
    later = np.logical_or.accumulate(used[:, ::-1], axis=1)[:, ::-1]
    return np.where(used, slots, np.where(later, AFTER_ALL, 0)).astype(np.int32)
