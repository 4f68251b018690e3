"""A task's slot in each class: as a mapping, and as the arrays that batches are made of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey

_KEYS: list[ClassKey] = []
_NUMBERS: dict[ClassKey, int] = {}
_LOCK = threading.Lock()


def class_number(key: ClassKey) -> int:
    """The number of a class, the same as long as the process lives; numbers begin at 0."""
    number = _NUMBERS.get(key)
    if number is None:
        with _LOCK:
            number = _NUMBERS.get(key)
            if number is None:
                number = len(_KEYS)
                _KEYS.append(key)
                _NUMBERS[key] = number  # last: other threads look it up without the lock
    return number


def numbered_class(number: int) -> ClassKey:
    """The inverse of ``class_number``."""
    return _KEYS[number]


class TaskSlots(dict[ClassKey, int]):
    """A task's slot in each class; slot 0 is no task's. It does not change, so what batches read of it is worked out
    once for all queries of the task."""

    @functools.cached_property
    def pairs(self) -> Int[np.ndarray, "2 classes"]:
        """The numbers of the classes, and the slots in them."""
        return np.array([[class_number(key) for key in self], list(self.values())], np.int32)

    @functools.cached_property
    def heavy(self) -> bool:
        """Whether the task has heavy deltas."""
        return any(class_method(key.method).kind == "heavy" for key in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskSlots, (dict(self),)  # the numbers are those of this process


NO_SLOTS = TaskSlots()


def task_slots(slots: Mapping[ClassKey, int]) -> TaskSlots:
    """``slots`` in this form."""
    if isinstance(slots, TaskSlots):
        return slots
    return TaskSlots(slots) if slots else NO_SLOTS
