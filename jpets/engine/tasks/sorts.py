"""Sorts of tasks: those of one sort have the same classes, so plans need not tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey


@dataclass(frozen=True, eq=False)
class Sort:
    """The classes of some tasks. There is one object for each set of classes, which is its own name."""

    classes: frozenset[ClassKey]
    kind: tuple[str, ...]
    """The names of its delta classes, by which costs are known."""
    heavy: frozenset[ClassKey]


_SORTS: dict[frozenset[ClassKey], Sort] = {}


def sort_of(slots: Mapping[ClassKey, int]) -> Sort:
    """The sort of a task with these slots."""
    classes = frozenset(slots)
    if classes not in _SORTS:
        kind = tuple(sorted(str(key) for key in classes if class_method(key.method).kind != "head"))
        heavy = frozenset(key for key in classes if class_method(key.method).kind == "heavy")
        return _SORTS.setdefault(classes, Sort(classes, kind, heavy))
    return _SORTS[classes]
