"""Finds the class for a task's delta, among the classes of an engine and those that are being made ready."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence

from jpets.deltas.bank import tightest
from jpets.deltas.protocol import ClassKey
from jpets.errors import Preparing, UnknownClass

MOST_SHAPES = 4096
"""How many shapes of deltas are remembered with their classes."""


class Fitting:
    """Thread-safe."""

    def __init__(self, classes: Iterable[ClassKey]) -> None:
        self._lock = threading.Lock()
        self.classes: Sequence[ClassKey] = tuple(classes)
        self._coming: frozenset[ClassKey] = frozenset()
        """Classes that are being made ready."""
        self._tightest = _remembered(self.classes)

    def fit(self, wanted: Sequence[ClassKey]) -> list[ClassKey]:
        """The class that takes each of these. Raises ``UnknownClass`` naming the deltas without one, ``Preparing`` if
        their classes are coming."""
        fitting = [self._tightest(key) for key in wanted]
        absent = [own for own, key in zip(wanted, fitting, strict=True) if key is None]
        if absent and all(tightest(own, tuple(self._coming)) for own in absent):
            raise Preparing("tasks of this shape can be served soon, their programs are being compiled; try again then")
        if absent:
            missing, known = list(map(str, absent)), sorted(str(key) for key in self.classes)
            raise UnknownClass(
                f"no class of this server holds {missing}; it was started with {known}. "
                "Start it with --reserve auto, which makes room for any shape, or store the delta in one of these"
            )
        return [key for key in fitting if key is not None]

    def expect(self, keys: Iterable[ClassKey]) -> None:
        """These classes are being made ready."""
        with self._lock:
            self._coming |= set(keys)

    def expect_no_more(self, keys: Iterable[ClassKey]) -> None:
        """These classes have come, or will not come."""
        with self._lock:
            self._coming -= set(keys)

    def add(self, keys: Iterable[ClassKey]) -> None:
        """From now on these classes are there too."""
        with self._lock:
            self.classes = (*self.classes, *keys)
            self._tightest = _remembered(self.classes)


def _remembered(classes: Sequence[ClassKey]) -> Callable[[ClassKey], ClassKey | None]:
    """``tightest`` among these classes: an answer for fewer classes, still on its way, is not kept for more."""
    return functools.lru_cache(maxsize=MOST_SHAPES)(lambda key: tightest(key, classes))
