"""Predicted times of batches, in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.profile_measurement import DeltaCosts
from jpets.engine.programs.program import Program, ProgramKey


class Predictions:
    """``costs`` are programs' costs; ``deltas`` the costs that heavy rows add, None if they were not measured."""

    def __init__(self, costs: CostTable, deltas: DeltaCosts | None) -> None:
        self._costs = costs
        self._deltas = deltas

    def added(self, rows: Sequence[Row]) -> float:
        """Time that the heavy deltas of these rows add to a program's."""
        return self._deltas.seconds(rows) if self._deltas else 0.0

    def seconds(self, rows: Sequence[Row], program: Program) -> float:
        """Time of these rows in a program that is ready."""
        return program.seconds + self.added(rows)

    def estimate(self, key: ProgramKey) -> float:
        """Time of a program that may never have run."""
        return self._costs.estimate(key)

    def ran(self, rows: Sequence[Row], program: Program, seconds: float) -> None:
        """Learns from a batch what its program costs, as far as the cost of heavy rows is known."""
        if self._deltas is not None or not any(row.heavy for row in rows):
            self._costs.follow(program, seconds - self.added(rows))
