"""Finds the program for a batch: the cheapest ready one, and the one that would be best."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.engine.batch.bucket import Bucket, Variant, make_variant
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.plan import Plan, without_heavy
from jpets.engine.planning.predictions import Predictions
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.errors import EngineFailure

WORTHWHILE = 0.9
"""A program is wanted when its predicted time is below this share of the best ready one's."""


class Placer:
    """For one replica. ``menu`` are the buckets that programs may be compiled for."""

    def __init__(self, replica: Replica, predictions: Predictions, menu: Sequence[Bucket]) -> None:
        self._replica = replica
        self._predictions = predictions
        self._menu = sorted(menu, key=lambda bucket: replica.family.network.arithmetic(bucket, Variant()))

    def place(self, pendings: Sequence[Pending], copy: Params | None = None) -> Plan:
        """The cheapest ready program for exactly these queries; ``copy`` holds their task's merged weights."""
        needs = Needs([pending.row if copy is None else without_heavy(pending) for pending in pendings])
        best, ideal = self._ready(needs), self._ideal(needs)
        layout = needs.layout(best.key.bucket)
        if ideal is None:
            return Plan(pendings, layout, best, copy=copy)
        added = self._predictions.added(needs.rows)
        seconds = self._predictions.estimate(ideal) + added
        known = best.seconds + added * needs.excess(best)
        if seconds >= WORTHWHILE * known or self._replica.has_program(ideal):
            return Plan(pendings, layout, best, copy=copy)
        return Plan(pendings, layout, best, ideal, known - seconds, copy)

    def ideal(self, rows: Sequence[Row]) -> ProgramKey | None:
        """The best program for these rows, compiled or not; None where the menu has no bucket for them."""
        return self._ideal(Needs(rows))

    def _ready(self, needs: Needs) -> Program:
        """A program of the cheapest bucket, with the best length of heavy runs if there is one."""
        programs = sorted(self._replica.programs, key=lambda program: program.seconds)
        best = next((program for program in programs if needs.met_by(program)), None)
        if best is None:
            raise EngineFailure(f"no ready program takes {len(needs.rows)} rows of up to {needs.lengths.max()} tokens")
        run = needs.run(best.key.bucket)
        alike = (p for p in programs if p.key.bucket == best.key.bucket and p.key.variant.run == run)
        return next((program for program in alike if needs.met_by(program)), best)

    def _ideal(self, needs: Needs) -> ProgramKey | None:
        bucket = next((bucket for bucket in self._menu if bucket.holds(needs.lengths)), None)
        if bucket is None:
            return None
        return ProgramKey(bucket, make_variant(needs.layout(bucket).needs, needs.run(bucket)))
