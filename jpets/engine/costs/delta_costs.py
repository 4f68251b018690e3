"""The time that rows of heavy classes add to a program, by a cost profile (beta, PetS section 4.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import HEAVY_RUNS
from jpets.engine.batch.rows import Row
from jpets.scheduling.costs.measured_profile import CostProfile
from jpets.scheduling.queue import Ints

HeavyTokens = Mapping[ClassKey, Ints]
"""The tokens [tasks] of each task with a heavy delta, by class."""


class DeltaCosts:
    """The time of a program was measured with its windows for light classes, whether rows use them or not. Rows of a
    task stand next to each other, so only their number of tokens counts (PetS equation 2). Packed rows need no padding
    to the longest."""

    def __init__(self, profile: CostProfile, classes: Iterable[ClassKey]) -> None:
        self._profile = profile
        self._heavy = frozenset(key for key in classes if str(key) in profile.heavy)

    def parts(self, tokens: HeavyTokens, run: int | None = None) -> dict[ClassKey, float]:
        """The cost of each heavy class in steps of ``run`` tokens, which are the same for all tasks of a batch; of the
        best length if not given."""
        counts = {key: own for key, own in tokens.items() if key in self._heavy}
        choices = [self._parts(counts, size) for size in ([run] if run is not None else HEAVY_RUNS)]
        return min(choices, key=lambda parts: sum(parts.values()))

    def _parts(self, counts: Mapping[ClassKey, Ints], run: int) -> dict[ClassKey, float]:
        return {key: self._seconds(str(key), tokens, run) for key, tokens in counts.items()}

    def _seconds(self, name: str, tokens: Ints, run: int) -> float:
        if (steps := self._profile.steps.get(name)) is not None:
            return float(steps.seconds(tokens, run).sum())
        return float(self._profile.beta[name].at([1], tokens)[0].sum())

    def seconds(self, tokens: HeavyTokens, run: int | None = None) -> float:
        """The sum of ``parts``."""
        return sum(self.parts(tokens, run).values())


def heavy_tokens(rows: Iterable[Row]) -> HeavyTokens:
    """What ``RowTable`` has of a batch, for a few rows without one."""
    tokens: dict[ClassKey, Counter[int]] = {}
    for row in rows:
        if row.heavy:
            for key, slot in row.slots.items():
                if class_method(key.method).kind == "heavy":
                    tokens.setdefault(key, Counter())[slot] += row.length
    return {key: np.array(list(own.values()), np.int_) for key, own in tokens.items()}
