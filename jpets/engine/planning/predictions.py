"""Predicted times of batches, in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.delta_costs import heavy_tokens
from jpets.engine.costs.live_profile import LiveProfile
from jpets.engine.programs.program import Program, ProgramKey


class Predictions:
    """``costs`` are programs' costs; ``profile`` has the costs that heavy rows add."""

    def __init__(self, costs: CostTable, profile: LiveProfile) -> None:
        self._costs = costs
        self._profile = profile

    def added(self, rows: Sequence[Row]) -> float:
        """Time that the heavy deltas of these rows add to a program's."""
        return self._profile.seconds(heavy_tokens(rows))

    def certainly_added(self, rows: Sequence[Row]) -> float:
        """``added``, where coarse figures count by half."""
        return self._profile.certain_seconds(heavy_tokens(rows))

    def seconds(self, table: RowTable, program: Program) -> float:
        """Time of these rows in a program that is ready."""
        return program.seconds + self._profile.seconds(table.heavy_tokens, _run(program.key))

    def of_key(self, table: RowTable, key: ProgramKey) -> float:
        """Time of these rows in a program that may never have run."""
        return self.estimate(key) + self._profile.seconds(table.heavy_tokens, _run(key))

    def estimate(self, key: ProgramKey) -> float:
        """Time of a program that may never have run, as fast as the machine is now."""
        return self._costs.estimate(key) * self._costs.pace.now

    def ran(self, table: RowTable, program: Program, seconds: float) -> None:
        """Learns from a batch what its program costs, and what its heavy rows add."""
        added = self._profile.seconds(table.heavy_tokens, _run(program.key))
        self._profile.ran(table.heavy_tokens, program, seconds)
        self._costs.follow(program, seconds - added)
        program.computed += seconds


def _run(key: ProgramKey) -> int:
    """Tokens of a step over a heavy class."""
    return key.bucket.run(key.variant.run)
