"""What batches are predicted to take. Times are seconds."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.profile_measurement import DeltaCosts
from jpets.engine.programs.program import Program, ProgramKey


class Predictions:
    """``costs`` are those of programs; ``deltas`` is what heavy rows add, None where it was not measured."""

    def __init__(self, costs: CostTable, deltas: DeltaCosts | None) -> None:
        self._costs = costs
        self._deltas = deltas

    def added(self, rows: Sequence[Row]) -> float:
        """By the heavy deltas of these rows to the time of a program."""
        return self._deltas.seconds(rows) if self._deltas else 0.0

    def seconds(self, rows: Sequence[Row], program: Program) -> float:
        """Of these rows in a program that is ready."""
        return program.seconds + self.added(rows)

    def estimate(self, key: ProgramKey) -> float:
        """Of a program that may never have run."""
        return self._costs.estimate(key)

    def ran(self, rows: Sequence[Row], program: Program, seconds: float) -> None:
        """Learns from a batch what its program costs, as far as it is known what heavy rows add."""
        if self._deltas is not None or not any(row.heavy for row in rows):
            self._costs.follow(program, seconds - self.added(rows))
