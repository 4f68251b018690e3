"""Predicted times of batches, in seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_table import SETTLED, CostTable
from jpets.engine.costs.delta_costs import heavy_tokens
from jpets.engine.costs.live_profile import LiveProfile
from jpets.engine.programs.program import Program, ProgramKey

MOST_PACE = 4.0
"""Times as slow or as fast as expected that programs are taken to be at most."""
PACE_SECONDS = 1.0
"""Seconds between looks at that."""


class Predictions:
    """``costs`` are programs' costs; ``profile`` has the costs that heavy rows add; ``ready`` gives the programs that
    batches run in."""

    def __init__(
        self, costs: CostTable, profile: LiveProfile, ready: Callable[[], Sequence[Program]] = lambda: ()
    ) -> None:
        self._costs = costs
        self._profile = profile
        self._ready = ready
        self._pace, self._pace_until = 1.0, 0.0

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
        return self._costs.estimate(key) * self.pace

    @property
    def pace(self) -> float:
        """How many times as long programs take now as they were expected to when they came: the median of those that
        have run often. Other work on the machine makes all of them slower; by figures of a quiet one, each that was
        never tried would look faster than those that run."""
        if (now := time.monotonic()) >= self._pace_until:
            known = [p.seconds / p.expected for p in self._ready() if p.followed >= SETTLED and p.expected > 0]
            self._pace = min(MOST_PACE, max(1 / MOST_PACE, statistics.median(known))) if known else 1.0
            self._pace_until = now + PACE_SECONDS
        return self._pace

    def ran(self, table: RowTable, program: Program, seconds: float) -> None:
        """Learns from a batch what its program costs, and what its heavy rows add."""
        added = self._profile.seconds(table.heavy_tokens, _run(program.key))
        self._profile.ran(table.heavy_tokens, program, seconds)
        self._costs.follow(program, seconds - added)
        program.computed += seconds


def _run(key: ProgramKey) -> int:
    """Tokens of a step over a heavy class."""
    return key.bucket.run(key.variant.run)
