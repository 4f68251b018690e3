"""Which waiting queries run next, and in which program: the cheapest that is ready and covers them."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set

import numpy as np

from jpets.config import EngineSettings
from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Bucket, Variant, make_variant
from jpets.engine.batch.layout import best_run, class_needs, run_work
from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_profile import DeltaCosts
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.device.replica import Generation, Replica
from jpets.engine.planning.merged import MergedCopies
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Resident
from jpets.errors import EngineFailure
from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.order.fairness import fair_batch
from jpets.scheduling.policies import ready
from jpets.scheduling.policies.contention import Contention, own_batch, short_batch
from jpets.scheduling.policies.hot import worth_taking_out

WORTHWHILE = 0.9
"""A program is wanted when its predicted time is below this share of the best ready one's."""
Takers = Mapping[Bucket, Sequence[Program]]
USUAL_TOKENS = 32
"""Of a text, to compare tasks by."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One batch to run. ``wanted`` is a program not yet compiled that would run it clearly cheaper, by ``missed``
    seconds.

    ``copy`` holds the weights it runs on where it is all one hot task's; ``rows`` then lack their heavy deltas.
    """

    pendings: Sequence[Pending]
    rows: Sequence[Row]
    program: Program
    wanted: ProgramKey | None = None
    missed: float = 0.0
    copy: Params | None = None
    saved: Mapping[Resident, float] = dataclasses.field(default_factory=dict)
    """Seconds that merged copies of these tasks save here, or would if they had any."""


def _bucket(program: Program) -> Bucket:
    return program.key.bucket


class _Needs:
    """What a program has to have for these rows; worked out for each bucket when it is first asked for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.lengths = np.array([row.length for row in rows])
        self._rows = rows
        self._heavy = any(row.heavy for row in rows)
        self._classes: dict[Bucket, Mapping[ClassKey, int]] = {}
        self._work: dict[Bucket, Mapping[int, int]] = {}

    def classes(self, bucket: Bucket) -> Mapping[ClassKey, int]:
        """The level of room for each class."""
        if bucket not in self._classes:
            self._classes[bucket] = class_needs(self._rows, bucket)
        return self._classes[bucket]

    def run(self, bucket: Bucket) -> int:
        """The length of heavy runs that takes least work."""
        return best_run(self._work_in(bucket)) if self._heavy else HEAVY_RUNS[0]

    def excess(self, program: Program) -> float:
        """The work of the program's heavy runs over that of the best length of run."""
        if not self._heavy:
            return 1.0
        work = self._work_in(program.key.bucket)
        return work[program.key.variant.run] / min(work.values())

    def met_by(self, program: Program) -> bool:
        """Long runs are mostly empty where few rows of a task meet, so they are only for rows that want them."""
        bucket, variant = program.key.bucket, program.key.variant
        held = bucket.holds(self.lengths) and variant.covers(self.classes(bucket))
        return held and variant.run in (HEAVY_RUNS[0], self.run(bucket))

    def _work_in(self, bucket: Bucket) -> Mapping[int, int]:
        if bucket not in self._work:
            self._work[bucket] = run_work(self._rows, bucket)
        return self._work[bucket]


def without_heavy(pending: Pending) -> Row:
    """A query's row for weights that its task's heavy deltas are part of."""
    assert pending.resident is not None
    return dataclasses.replace(pending.row, slots=pending.resident.light_slots)


class Planner:
    """Reads the replica's table of ready programs and keeps what follows from it; ``ran`` corrects their costs."""

    def __init__(
        self,
        replica: Replica,
        costs: CostTable,
        deltas: DeltaCosts | None,
        settings: EngineSettings,
        menu: Sequence[Bucket],
        merged: MergedCopies | None = None,
    ) -> None:
        self._replica = replica
        self._costs = costs
        self._deltas = deltas
        self._settings = settings
        self._merged = merged
        self._menu = sorted(menu, key=self._bare_cost)
        self._contention = Contention(settings.flood_stretch)
        self._programs: Sequence[Program] = ()
        self._generations: Sequence[Generation] = ()
        self._usual: frozenset[ClassKey] = frozenset()
        """Classes whose rows share batches; rows of the others that there are run apart."""
        self._takers: dict[bool, Takers] = {}
        """Of ``_programs`` those that take any mixture of usual classes, heavy ones among them or not, by bucket."""
        self._all_takers: Takers = {}
        """Those that take any mixture of all classes."""

    def shapes(self, *, heavy: bool, rare: bool = False) -> list[Shape]:
        """Ready shapes that take any mixture of tasks, heavy ones or ones of rare classes among them if asked, with
        their costs."""
        return [
            Shape(bucket.tokens, bucket.groups, min(program.seconds for program in own), bucket.rectangular)
            for bucket, own in self._takers_of_any(heavy=heavy, rare=rare).items()
        ]

    def next_batch(self, waiting: Sequence[Pending], *, busy: bool = False) -> Plan:
        """The batch with the most urgent query of ``waiting`` (most urgent first), by the engine's policy.

        Its companions are the policy's choice, as far as that leaves every tenant its part of the batch. While the
        device is ``busy`` with another batch, ``auto`` puts off what would leave this one's shape half empty.
        """
        waiting, rare = self._together(waiting)
        if self._settings.policy == "steady":
            return self._steady(waiting, rare=rare)
        lengths = [pending.row.length for pending in waiting]
        heavy = [pending.row.heavy for pending in waiting]
        if (contended := self._contended_plan(waiting, lengths, heavy, rare=rare)) is not None:
            return contended
        light, most = self.shapes(heavy=False, rare=rare), self._settings.max_batch_rows
        shapes = self.shapes(heavy=True, rare=rare) if any(heavy) else light
        if self._settings.policy == "fixed":
            batches = ready.in_turn(lengths, shapes, most, self._settings.fixed_batch)
        elif self._settings.policy == "alpha":
            batches = ready.cheapest_split(lengths, shapes, most)
        else:
            batches = ready.heavy_apart(lengths, heavy, light, shapes, most)
        chosen = next(batch for batch in batches if 0 in batch)
        chosen = fair_batch(chosen, [pending.party for pending in waiting], lengths, shapes, most)
        if busy and self._settings.policy == "auto":
            own = shapes if any(heavy[q] for q in chosen) else light
            chosen = ready.well_filled(chosen, lengths, own, most)
        batch = [waiting[q] for q in chosen]
        if self._merged is not None and self._merged.enabled:
            return self._with_copies(batch, waiting[0], light, shapes)
        return self.place(batch)

    def _together(self, waiting: Sequence[Pending]) -> tuple[Sequence[Pending], bool]:
        """Those that may share a batch with the most urgent one, and whether their classes are rare."""
        self._hear_of_programs()
        if len(self._usual) == len(self._replica.family.slots):
            return waiting, False
        rare = [not self._usual.issuperset(pending.row.slots) for pending in waiting]
        return [p for p, own in zip(waiting, rare, strict=True) if own == rare[0]], rare[0]

    def _with_copies(
        self, batch: Sequence[Pending], first: Pending, light: Sequence[Shape], shapes: Sequence[Shape]
    ) -> Plan:
        """``batch``, or, where it is faster to run hot tasks on merged copies, the part of it that has ``first``."""
        assert self._merged is not None
        owners = [pending.resident if pending.row.heavy else None for pending in batch]
        rows: dict[Resident, list[Row]] = {}
        for pending, owner in zip(batch, owners, strict=True):
            if owner is not None:
                rows.setdefault(owner, []).append(pending.row)
        added = {owner: self._added(own) for owner, own in rows.items()}
        lengths = [pending.row.length for pending in batch]
        would_save = worth_taking_out(owners, lengths, added, light, shapes)
        copies = self._merged.copies
        held = {owner: seconds for owner, seconds in added.items() if owner in copies}
        apart = worth_taking_out(owners, lengths, held, light, shapes)
        mine = first.resident if first.resident in apart else None
        if mine is not None:
            plan = self.place([p for p in batch if p.resident is mine], copies[mine])
        else:
            plan = self.place([p for p in batch if p.resident not in apart])
        running = {pending.resident for pending in plan.pendings}
        saved = {owner: seconds for owner, seconds in would_save.items() if owner in running}
        return dataclasses.replace(plan, saved=saved)

    def drop_copies(self) -> None:
        """Gives the memory of merged copies back."""
        if self._merged is not None:
            self._merged.clear()

    def contended(self) -> bool:
        """Whether batches are kept short at the moment, for those who use less than their part of the device."""
        return self._contention.lasts(time.monotonic())

    def _contended_plan(
        self, waiting: Sequence[Pending], lengths: Sequence[int], heavy: Sequence[bool], *, rare: bool
    ) -> Plan | None:
        """The batch while somebody floods the device and others keep to their part; None while nobody does."""
        now, most = time.monotonic(), self._settings.max_batch_rows
        parties = [pending.party for pending in waiting if pending.priority == waiting[0].priority]
        modest = self._contention.modest(parties, most, now)
        if not self._contention.lasts(now):
            return None
        first = modest or [0]
        loops = any(heavy[q] for q in first)
        others = [q for q in range(len(waiting)) if q not in first and (loops or not heavy[q])]
        shapes = self.shapes(heavy=loops, rare=rare)
        if not modest:
            batch = short_batch([0, *others], lengths, shapes, most, self._contention.longest)
            return self.place([waiting[q] for q in batch])
        return self.place([waiting[q] for q in own_batch(modest, others, lengths, shapes, most)])

    @property
    def keeping(self) -> Set[Hashable]:
        """Who keeps to its part while somebody floods the device."""
        return self._contention.keeping

    def serving(self, plan: Plan) -> None:
        """Hears what is going to be computed."""
        if self._merged is not None and self._merged.enabled:
            self._merged.saves(plan.saved)
        tokens: Counter[Hashable] = Counter()
        for pending in plan.pendings:
            tokens[pending.party] += pending.tokens
        if not self.keeping.isdisjoint(tokens):
            self._contention.ran(self.seconds(plan.rows, plan.program))
        self._contention.spend(tokens, time.monotonic())

    def _steady(self, waiting: Sequence[Pending], *, rare: bool) -> Plan:
        """The most urgent query's own program, filled with others whose own it is."""
        own: dict[tuple[int, bool], Program] = {}
        kinds = [(pending.row.length, pending.row.heavy) for pending in waiting]
        for length, heavy in dict.fromkeys(kinds):
            own[length, heavy] = self._own_program(length, heavy, rare=rare)
        program = own[kinds[0]]
        same = [pending for pending, kind in zip(waiting, kinds, strict=True) if own[kind] is program]
        taken = same[: program.key.bucket.rows]
        return Plan(taken, [pending.row for pending in taken], program)

    def _own_program(self, length: int, heavy: bool, *, rare: bool) -> Program:
        """By length and kind alone: of the programs for any mixture the one of the shortest rows, without heavy classes
        where it can be. Its cost, which every start measures anew, has no say.
        """
        fitting = [
            program
            for bucket, own in self._takers_of_any(heavy=heavy, rare=rare).items()
            if bucket.rectangular and bucket.longest >= length
            for program in own
        ]
        if not fitting:
            raise EngineFailure(f"no ready program has rows of {length} tokens; the policy needs rectangular buckets")
        return min(fitting, key=lambda each: (each.key.bucket.longest, each.key.variant.has("heavy"), str(each.key)))

    def _takers_of_any(self, *, heavy: bool, rare: bool) -> Takers:
        """Ready programs for rows of any usual classes, heavy ones among them if asked, or of all classes."""
        self._hear_of_programs()
        return self._all_takers if rare else self._takers[heavy]

    def _hear_of_programs(self) -> None:
        """Derives anew what follows from the ready programs and their costs where the replica's table has changed."""
        if self._programs is self._replica.programs and self._generations is self._replica.generations:
            return
        self._programs, self._generations = self._replica.programs, self._replica.generations
        ready = [g for g in self._generations if all(map(self._replica.has_program, g.core))]
        self._usual = ready[-1].classes
        self._takers = {heavy: self._covering(self._usual, heavy=heavy) for heavy in (False, True)}
        self._all_takers = self._covering(self._replica.classes, heavy=True)
        rates = (b.tokens / p.seconds for b, own in self._takers[False].items() for p in own if p.seconds)
        self._contention.rate = max(rates, default=0.0)

    def _covering(self, classes: Iterable[ClassKey], *, heavy: bool) -> Takers:
        usual = [p for p in self._programs if p.key.variant.run == HEAVY_RUNS[0]]  # long runs are not for any mixture
        needs = {key: FULL for key in classes if heavy or class_method(key.method).kind != "heavy"}
        takers = sorted((p for p in usual if p.key.variant.covers(needs)), key=_bucket)
        return {bucket: list(own) for bucket, own in itertools.groupby(takers, key=_bucket)}

    def place(self, pendings: Sequence[Pending], copy: Params | None = None) -> Plan:
        """The cheapest ready program for exactly these queries; ``copy`` holds their task's merged weights."""
        rows = [pending.row if copy is None else without_heavy(pending) for pending in pendings]
        needs = _Needs(rows)
        programs = sorted(self._replica.programs, key=lambda program: program.seconds)
        best = next((program for program in programs if needs.met_by(program)), None)
        if best is None:
            raise EngineFailure(f"no ready program takes {len(rows)} rows of up to {needs.lengths.max()} tokens")
        run = needs.run(best.key.bucket)
        alike = (p for p in programs if p.key.bucket == best.key.bucket and p.key.variant.run == run)
        best = next((program for program in alike if needs.met_by(program)), best)
        ideal = self.ideal(rows)
        if ideal is None:
            return Plan(pendings, rows, best, copy=copy)
        added = self._added(rows)
        seconds = self._costs.estimate(ideal) + added
        known = best.seconds + added * needs.excess(best)
        if seconds >= WORTHWHILE * known or self._replica.has_program(ideal):
            return Plan(pendings, rows, best, copy=copy)
        return Plan(pendings, rows, best, ideal, known - seconds, copy)

    def ideal(self, rows: Sequence[Row]) -> ProgramKey | None:
        """The program that would run these rows best, compiled or not; None where the menu has no bucket for them."""
        needs = _Needs(rows)
        bucket = next((bucket for bucket in self._menu if bucket.holds(needs.lengths)), None)
        return ProgramKey(bucket, make_variant(needs.classes(bucket), needs.run(bucket))) if bucket else None

    def _bare_cost(self, bucket: Bucket) -> float:
        return self._replica.family.network.arithmetic(bucket, Variant())

    def predicted(self, waiting: Sequence[Pending]) -> float:
        """Seconds that the next batch of these queries would take."""
        plan = self.next_batch(waiting)
        return self.seconds(plan.rows, plan.program)

    def query_weight(self, slots: Mapping[ClassKey, int]) -> float:
        """What a row with these slots takes of a well-filled batch, in times of a bare row."""
        self._hear_of_programs()
        return 1 + self._added([Row({}, slots, 0, USUAL_TOKENS)]) * self._contention.rate / USUAL_TOKENS

    def seconds(self, rows: Sequence[Row], program: Program) -> float:
        """Predicted time of these rows in a program."""
        return program.seconds + self._added(rows)

    def ran(self, rows: Sequence[Row], program: Program, seconds: float) -> None:
        """Learns from a batch what its program costs, as far as it is known what heavy rows add."""
        if self._deltas is not None or not any(row.heavy for row in rows):
            self._costs.follow(program, seconds - self._added(rows))

    def _added(self, rows: Sequence[Row]) -> float:
        return self._deltas.seconds(rows) if self._deltas else 0.0
