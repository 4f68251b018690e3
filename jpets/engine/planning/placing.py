"""Finds the program for a batch: the cheapest ready one, and the one that would be best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from jpets.engine.batch.bucket import FULL, LEVELS, Variant
from jpets.engine.batch.rows import Row
from jpets.engine.costs.pace import SETTLED
from jpets.engine.device.replica import Replica
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.plan import Plan, row_on_copy
from jpets.engine.planning.predictions import Predictions
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.errors import EngineFailure

WORTHWHILE = 0.9
"""A program is wanted when its predicted time is below this share of the best ready one's."""
NEARLY = 0.9
"""A program is asked for in the place of the best one if it gains at least this share of what that would."""
SPLIT_LOSS = 0.5
"""What a batch that no program takes loses by running in parts, as a share of its predicted time."""
FEW_QUERIES = 8
"""Batches of fewer queries differ most, and ask for programs that many of them can use. What larger windows miss, and
few queries that run in several batches, is seen when they are planned. Where all room for runs is computed, only a
program with as little as possible will do."""
COARSE_LEVELS = (2, 4, FULL)
"""Room that programs for coming traffic give light classes, in eighths: few steps, so that few programs are enough.
Beside heavy classes of few queries they get all: it costs little beside loops."""


def _room(variant: Variant) -> tuple[int, int]:
    """Classes, and their levels in all."""
    classes = variant.classes()
    return len(classes), sum(map(variant.level, classes))


def _has_more(key: ProgramKey, other: ProgramKey) -> bool:
    """Whether a program computes all that another one does, in runs of the same length, and something besides."""
    variant, less = key.variant, other.variant
    alike = variant != less and variant.run == less.run and variant.replaced == less.replaced
    return alike and variant.has_room({each: less.level(each) for each in less.classes()})


class NoProgram(EngineFailure):
    """No ready program takes these rows together; fewer of them one may take."""


class Compiling(Protocol):
    """What compiles programs in the background."""

    def want(self, key: ProgramKey, seconds: float) -> None:
        """Is told of a program and of the seconds that batches lost without it."""

    def missed(self) -> Sequence[ProgramKey]:
        """A few programs that batches miss most, the most missed first."""

    def barred(self, key: ProgramKey) -> bool:
        """Whether a program cannot be had for now."""


class Placer:
    """For one replica. ``menu`` are the buckets that programs may be compiled for; ``compiling`` tells of programs that
    other batches miss."""

    def __init__(
        self,
        replica: Replica,
        predictions: Predictions,
        menu: Menu,
        compiling: Compiling | None = None,
    ) -> None:
        self._replica = replica
        self._predictions = predictions
        self._menu = menu
        self._compiling = compiling
        self._known: tuple[Sequence[Program], dict[int, Sequence[Program]]] = ((), {})

    def place(self, pendings: Sequence[Pending], copy: Params | None = None) -> Plan:
        """The cheapest ready program for exactly these queries; ``copy`` holds their task's merged weights.

        Raises ``NoProgram``, and asks for one: shapes that plans fill say nothing of the room for a light class.
        """
        needs = Needs([pending.row if copy is None else row_on_copy(pending) for pending in pendings])
        try:
            best, known = self._ready(needs)
        except NoProgram:
            missing = self._ideal(needs, COARSE_LEVELS)
            if self._compiling is not None and missing is not None and not self._replica.has_program(missing):
                self._compiling.want(missing, SPLIT_LOSS * self._predictions.of_key(needs.table, missing))
            raise
        layout = needs.layout(best.key.bucket)
        many_share = len(pendings) < FEW_QUERIES and not self._static_runs and copy is None
        compiling = self._compiling if many_share else None
        ideal = self._ideal(needs, (FULL,) if needs.heavy and compiling is not None else COARSE_LEVELS)
        if ideal is None or self._replica.has_program(ideal):
            return Plan(pendings, layout, best, known, copy=copy)
        seconds = self._predictions.of_key(needs.table, ideal)
        if seconds >= WORTHWHILE * known:
            return Plan(pendings, layout, best, known, copy=copy)
        wanted, missed = ideal, known - seconds
        if compiling is not None:
            wanted, missed = self._to_ask_for(compiling, needs, best, ideal, known, missed)
        return Plan(pendings, layout, best, known, wanted, missed, copy)

    def _to_ask_for(
        self, compiling: Compiling, needs: Needs, best: Program, ideal: ProgramKey, known: float, gain: float
    ) -> tuple[ProgramKey, float]:
        """The program to compile for such rows, and the seconds that they gain by it over ``known``, which they take in
        the ``best`` ready program; ``gain`` by the ideal one.

        Every mixture of classes has another ideal program. So that few are enough, one that other batches miss comes
        before it, and then one with as much room as the ready program, as long as the rows gain nearly as much.
        """
        for key in (*compiling.missed(), ProgramKey(ideal.bucket, best.key.variant)):
            if key == ideal:
                break
            to_be_had = key.trunk is None and not (self._replica.has_program(key) or compiling.barred(key))
            if to_be_had and key.variant.replaced == ideal.variant.replaced and needs.met_by(key):
                own = known - self._predictions.of_key(needs.table, key)
                if own >= NEARLY * gain:
                    return key, own
        return ideal, gain

    def reach(self, plan: Plan) -> float:
        """The time of a plan's queries in the program that it wants, if that can be had."""
        can_be_had = plan.wanted is not None and self._compiling is not None and not self._compiling.barred(plan.wanted)
        return plan.seconds - plan.missed if can_be_had else plan.seconds

    def ideal(self, rows: Sequence[Row]) -> ProgramKey | None:
        """The best program for these rows, compiled or not; None where the menu has no bucket for them."""
        return self._ideal(Needs(rows), LEVELS)

    def _ready(self, needs: Needs) -> tuple[Program, float]:
        """The ready program in which these rows are predicted to take least time, and that time."""
        best, least = None, math.inf
        for program in sorted(self._replica.for_mixtures, key=lambda program: program.seconds):
            if program.seconds >= least:
                break
            if needs.met_by(program.key) and (seconds := self._predictions.seconds(needs.table, program)) < least:
                best, least = program, seconds
        if best is None:
            raise NoProgram(f"no ready program takes {len(needs.rows)} rows of up to {needs.lengths.max()} tokens")
        return self._narrowest(best, needs), least

    def _narrowest(self, program: Program, needs: Needs) -> Program:
        """The ready program of the same shape that has least beside what these rows need, unless it is known to take
        longer. By an estimate, or a first time, that is a little too long it would never be taken, and so never be
        found to be faster."""
        for other in self._narrower(program):
            if (other.followed < SETTLED or other.seconds <= program.seconds) and needs.met_by(other.key):
                return other
        return program

    def _narrower(self, program: Program) -> Sequence[Program]:
        """The ready programs of its shape that compute less, those that compute least first."""
        ready = self._replica.for_mixtures
        if self._known[0] is not ready:
            self._known = (ready, {})
        narrower = self._known[1]
        if id(program) not in narrower:  # a key would be hashed with all its classes
            less = [p for p in ready if p.key.bucket == program.key.bucket and _has_more(program.key, p.key)]
            narrower[id(program)] = sorted(less, key=lambda each: _room(each.key.variant))
        return narrower[id(program)]

    def _ideal(self, needs: Needs, levels: Sequence[int]) -> ProgramKey | None:
        bucket = next((bucket for bucket in self._menu.buckets if bucket.holds(needs.lengths)), None)
        if bucket is None:
            return None
        return ProgramKey(bucket, needs.variant(bucket, levels, static_runs=self._static_runs))

    @property
    def _static_runs(self) -> bool:
        return self._replica.family.operators.static_runs
