"""The time that rows of heavy classes add to a program, by a cost profile (beta, PetS section 4.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.rows import Row
from jpets.scheduling.costs.measured_profile import CostProfile

TABLE_TOKENS = 4096
"""Tokens of one task up to which costs are in a table; beyond, they grow in proportion."""


class DeltaCosts:
    """The time of a program was measured with its windows for light classes, whether rows use them or not. Rows of a
    task stand next to each other, so only their number of tokens counts."""

    def __init__(self, profile: CostProfile, classes: Iterable[ClassKey]) -> None:
        heavy = [key for key in classes if class_method(key.method).kind == "heavy"]
        self._tables = {
            key: profile.packed_delta_seconds(str(key), TABLE_TOKENS) for key in heavy if str(key) in profile.beta
        }

    def parts(self, rows: Sequence[Row]) -> dict[ClassKey, float]:
        """The cost of each heavy class's rows: the sum over its tasks (PetS equation 2). Packed rows need no padding to
        the longest."""
        tokens: Counter[tuple[ClassKey, int]] = Counter()
        for row in rows:
            for key, slot in row.slots.items():
                if key in self._tables:
                    tokens[key, slot] += row.length
        parts: dict[ClassKey, float] = {}
        for (key, _), count in tokens.items():
            within = float(self._tables[key][min(count, TABLE_TOKENS)])
            parts[key] = parts.get(key, 0.0) + within * max(1.0, count / TABLE_TOKENS)
        return parts

    def seconds(self, rows: Sequence[Row]) -> float:
        """The sum of ``parts``."""
        return sum(self.parts(rows).values())
