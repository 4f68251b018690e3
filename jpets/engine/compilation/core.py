"""The programs without which rows of some classes cannot share batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, core_programs, widest
from jpets.engine.programs.program import ProgramKey


class Core(NamedTuple):
    """Of the buckets of ``menu``; ``chosen``: these were given, and there are no others."""

    menu: Sequence[Bucket]
    chosen: bool = False

    def programs(self, classes: Iterable[ClassKey]) -> tuple[ProgramKey, ...]:
        """What takes any mixture of ``classes`` without much waste; of buckets that were given all."""
        if not self.chosen:
            return self._least(classes)
        each = (widest(classes, heavy=heavy) for heavy in (False, True))
        return tuple(dict.fromkeys(ProgramKey(bucket, variant) for variant in each for bucket in self.menu))

    def takers(self, classes: Sequence[ClassKey]) -> tuple[ProgramKey, ...]:
        """Those that take any mixture of ``classes`` at all."""
        heavy = widest(classes, heavy=True)
        return tuple(key for key in self._least(classes) if key.variant == heavy)

    def _least(self, classes: Iterable[ClassKey]) -> tuple[ProgramKey, ...]:
        light, heavy = (widest(classes, heavy=each) for each in (False, True))
        return tuple(ProgramKey(*pair) for pair in core_programs(self.menu, light, heavy))
