"""Which waiting queries run next, and in which program: the cheapest that is ready and covers them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial

from jpets.config import EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.live_profile import LiveProfile
from jpets.engine.device.replica import Replica
from jpets.engine.planning.flood import FloodGuard
from jpets.engine.planning.hot_tasks import HotTasks
from jpets.engine.planning.kept_plan import KeptPlan
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.merged import MergedCopies
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.placing import Compiling, NoProgram, Placer
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import ReadyPrograms, Takers
from jpets.engine.planning.steady import steady_part, steady_plan
from jpets.engine.planning.trunks import Trunks, shares_trunks
from jpets.engine.planning.window import Pricing, read_window
from jpets.engine.planning.wishes import Wishes
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.scheduling.order.fairness import fair_batch, fill, lacking
from jpets.scheduling.policies import ready as policies
from jpets.scheduling.policies.auto import POLICIES, Policy, auto
from jpets.scheduling.policies.offline import fixed

USUAL_TOKENS = 32
"""Tokens of a text, to compare tasks by."""


class Planner:
    """Plans batches by the engine's policy, from the programs that are ``ready``; ``ran`` corrects their costs.

    ``compiling`` is told of programs that windows miss, and tells which ones are missed most.
    """

    def __init__(
        self,
        replica: Replica,
        costs: CostTable,
        profile: LiveProfile,
        settings: EngineSettings,
        menu: Menu,
        merged: MergedCopies | None = None,
        compiling: Compiling | None = None,
    ) -> None:
        self.ready = ReadyPrograms(replica, costs.pace)
        self._predictions = Predictions(costs, profile)
        self._placer = Placer(replica, self._predictions, menu, compiling)
        self._flood = FloodGuard(self.ready, self._predictions, settings.flood_stretch, settings.max_batch_rows)
        self._pricing = Pricing(lambda: profile.current, settings.max_batch_rows)
        self._policy = named_policy(settings)
        self._wishes = (
            Wishes(replica, menu, self._predictions, self._pricing, self._policy, compiling)
            if compiling is not None
            else None
        )
        self._trunks = (
            Trunks(replica, self.ready, self._predictions, menu, settings, compiling)
            if shares_trunks(replica, settings)
            else None
        )
        self._kept = KeptPlan()
        self._of_window = False
        """Whether the latest batch is one of a window's plan: the time of another says nothing of what windows lose."""
        self._settings = settings
        self._hot = (
            HotTasks(merged, self.ready, self._predictions, self._placer)
            if merged is not None and merged.enabled
            else None
        )

    def next_batch(self, waiting: Sequence[Pending], *, busy: bool = False) -> Plan:
        """The batch with the most urgent query of ``waiting`` (most urgent first), by the engine's policy.

        Its companions are the policy's choice, as far as every tenant keeps its part of the batch. While the device is
        ``busy`` with another batch, ``auto`` postpones queries that would leave this one's shape half empty.
        """
        self._of_window = False
        waiting, rare = self.ready.together(waiting)
        if self._settings.policy == "steady":
            return steady_plan(waiting, self._takers(rare=rare), self._predictions.seconds)
        if (contended := self._flood.batch(waiting, rare=rare)) is not None:
            self._kept.forget()
            return self.place(contended) if self._hot is None else self._hot.plan(contended, contended[0], rare=rare)
        if self._trunks is not None:
            if (plan := self._trunks.plan(waiting)) is not None:
                return plan
            waiting = self._trunks.without_texts(waiting)
        self._of_window = True
        chosen = self._kept.batch(waiting)
        if chosen is None:
            batches = self._batches(waiting)
            self._kept.keep(waiting, batches)
            chosen = next(batch for batch in batches if 0 in batch)
        fair = self._fair(chosen, waiting)
        if fair is not chosen and set(fair) != set(chosen):
            self._kept.forget()  # what the batch leaves behind, and whose places were taken, make other batches
        chosen = fair
        if busy and self._settings.policy == "auto":
            own = self.ready.shapes_of(frozenset(waiting[q].sort for q in chosen))
            lengths = [pending.row.length for pending in waiting]
            filled = policies.well_filled(chosen, lengths, own, self._settings.max_batch_rows)
            self._kept.put_off(waiting[q] for q in set(chosen).difference(filled))
            chosen = filled
        while True:
            batch = [waiting[q] for q in chosen]
            try:
                return self.place(batch) if self._hot is None else self._hot.plan(batch, waiting[0], rare=rare)
            except NoProgram:
                if len(chosen) == 1:
                    raise
            urgent = set(sorted(chosen)[: len(chosen) // 2])
            self._kept.put_off(waiting[q] for q in chosen if q not in urgent)
            chosen = [q for q in chosen if q in urgent]

    def _takers(self, *, rare: bool) -> Callable[[bool], Takers]:
        return lambda heavy: self.ready.takers(heavy=heavy, rare=rare)

    def _fair(self, chosen: list[int], waiting: Sequence[Pending]) -> list[int]:
        """``chosen``, or, for several parties, what keeps each one's part in a shape that takes all of them."""
        parties = [pending.party for pending in waiting]
        if not lacking(chosen, parties):
            return chosen
        most, lengths = self._settings.max_batch_rows, [pending.row.length for pending in waiting]
        involved = {*range(len(chosen)), *chosen}
        shapes = self.ready.shapes_of(frozenset(waiting[q].sort for q in involved))
        held = [fill(sorted(chosen), lengths, shape, most) for shape in shapes]
        best = max((members for members in held if 0 in members), key=len)
        return fair_batch(best, parties, lengths, shapes, most)

    def _batches(self, waiting: Sequence[Pending]) -> list[list[int]]:
        """The plan of the window, as places in it. For one query there is no other, and it is worth no search: most
        queries of light traffic come alone."""
        if len(waiting) == 1:
            if self._wishes is not None:
                self._wishes.alone()
            return [[0]]
        window = read_window(waiting)
        costs = self._pricing.costs(window.sorts, self.ready.shapes_for(window.sorts))
        plan = self._policy(window.queue, costs)
        if self._wishes is not None:
            self._wishes.planned(window, len(plan), costs.device_seconds(window.queue, plan))
        return [batch.queries.tolist() for batch in plan]

    def place(self, pendings: Sequence[Pending], copy: Params | None = None) -> Plan:
        """The cheapest ready program for exactly these queries; ``copy`` holds their task's merged weights. By the
        policy ``steady`` their own one."""
        if self._settings.policy == "steady":
            _, rare = self.ready.together(pendings)
            return steady_part(pendings, self._takers(rare=rare), self._predictions.seconds)
        return self._placer.place(pendings, copy)

    def narrowed(self, plan: Plan, pendings: Sequence[Pending]) -> Plan:
        """``plan`` for some of its queries. Programs for mixtures need not take so many rows of one text."""
        needs = Needs([pending.row for pending in pendings])
        if plan.below is None or not needs.met_by(plan.program.key):
            return self.place(pendings, plan.copy)
        return dataclasses.replace(plan, pendings=pendings, layout=needs.layout(plan.program.key.bucket))

    def ideal(self, pendings: Sequence[Pending]) -> ProgramKey | None:
        """The best program for these queries, compiled or not; None where the menu has no bucket for them."""
        if self._trunks is not None and (key := self._trunks.ideal(pendings)) is not None:
            return key
        return self._placer.ideal([pending.row for pending in pendings])

    def drop_copies(self) -> None:
        """Frees the memory of merged copies."""
        if self._hot is not None:
            self._hot.drop_copies()

    def contended(self) -> bool:
        """Whether batches are kept short now, for tenants that use less than their part of the device."""
        return self._flood.lasts

    @property
    def keeping(self) -> Set[Hashable]:
        """The parties that keep to their part while another one floods the device."""
        return self._flood.keeping

    def serving(self, plan: Plan) -> None:
        """Is told which plan will be computed."""
        if self._hot is not None:
            self._hot.serving(plan)
        self._flood.serving(plan.pendings, plan.seconds)
        if self._wishes is not None and self._of_window:
            self._wishes.ran(plan.seconds)

    def predicted(self, waiting: Sequence[Pending]) -> float:
        """Seconds that the next batch of these queries would take."""
        return self.next_batch(waiting).seconds

    def query_weight(self, slots: Mapping[ClassKey, int]) -> float:
        """The cost of a row with these slots in a well-filled batch, as a multiple of a bare row's."""
        added = self._predictions.added([Row({}, slots, 0, USUAL_TOKENS)])
        return 1 + added * self.ready.rate / USUAL_TOKENS

    def ran(self, table: RowTable, program: Program, seconds: float) -> None:
        """Learns from a batch what its program costs."""
        self._predictions.ran(table, program, seconds)


def named_policy(settings: EngineSettings) -> Policy:
    """The function of the policy that ``settings`` name; ``steady`` has none."""
    if settings.policy == "fixed":
        return partial(fixed, size=settings.fixed_batch)
    if settings.policy in ("auto", "steady"):
        return lambda queue, costs: auto(queue, costs).plan
    return POLICIES[settings.policy]
