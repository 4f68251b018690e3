"""Finds the program for a batch: the cheapest ready one, and the one that would be best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jpets.engine.batch.bucket import FULL, LEVELS
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.plan import Plan, without_heavy
from jpets.engine.planning.predictions import Predictions
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.errors import EngineFailure

WORTHWHILE = 0.9
"""A program is wanted when its predicted time is below this share of the best ready one's."""
COARSE_LEVELS = (2, 4, FULL)
"""Room that programs for coming traffic give light classes, in eighths: few steps, so that few programs are enough."""


class Placer:
    """For one replica. ``menu`` are the buckets that programs may be compiled for."""

    def __init__(self, replica: Replica, predictions: Predictions, menu: Menu) -> None:
        self._replica = replica
        self._predictions = predictions
        self._menu = menu

    def place(self, pendings: Sequence[Pending], copy: Params | None = None) -> Plan:
        """The cheapest ready program for exactly these queries; ``copy`` holds their task's merged weights."""
        needs = Needs([pending.row if copy is None else without_heavy(pending) for pending in pendings])
        best, known = self._ready(needs)
        layout = needs.layout(best.key.bucket)
        ideal = self._ideal(needs, COARSE_LEVELS)
        if ideal is None or self._replica.has_program(ideal):
            return Plan(pendings, layout, best, known, copy=copy)
        seconds = self._predictions.of_key(needs.table, ideal)
        if seconds >= WORTHWHILE * known:
            return Plan(pendings, layout, best, known, copy=copy)
        return Plan(pendings, layout, best, known, ideal, known - seconds, copy)

    def ideal(self, rows: Sequence[Row]) -> ProgramKey | None:
        """The best program for these rows, compiled or not; None where the menu has no bucket for them."""
        return self._ideal(Needs(rows), LEVELS)

    def _ready(self, needs: Needs) -> tuple[Program, float]:
        """The ready program in which these rows are predicted to take least time, and that time."""
        best, least = None, math.inf
        for program in sorted(self._replica.programs, key=lambda program: program.seconds):
            if program.seconds >= least:
                break
            if needs.met_by(program) and (seconds := self._predictions.seconds(needs.table, program)) < least:
                best, least = program, seconds
        if best is None:
            raise EngineFailure(f"no ready program takes {len(needs.rows)} rows of up to {needs.lengths.max()} tokens")
        return best, least

    def _ideal(self, needs: Needs, levels: Sequence[int]) -> ProgramKey | None:
        bucket = next((bucket for bucket in self._menu.buckets if bucket.holds(needs.lengths)), None)
        if bucket is None:
            return None
        static = self._replica.family.operators.static_runs
        return ProgramKey(bucket, needs.variant(bucket, levels, static_runs=static))
