"""Which part of a batch runs on a hot task's merged copy."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter

from jpets.engine.batch.rows import Row
from jpets.engine.planning.merged import MergedCopies
from jpets.engine.planning.placing import WORTHWHILE, Placer
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import ReadyPrograms
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Resident
from jpets.model.encoder import Params
from jpets.scheduling.costs.ready_lookup import HOST_SECONDS
from jpets.scheduling.policies.hot import worth_taking_out

MOST_APART = 4
"""Most tasks with low-rank deltas that leave a batch at a time."""
MOST_DEAR = 32
"""Most tasks with heavy deltas of a batch of which it is found out what a copy would save."""
GOOD_PART = 1 / 8
"""Part of a batch's tokens that such a task must have to leave: a batch of its own costs more than their deltas."""


class HotTasks:
    """Tells ``merged`` what copies save or would save, and plans for those that there are.

    A copy holds a task's heavy deltas, which cost a pass over their own weights, and its low-rank ones, for which a
    program has room that the rows take or not.
    """

    def __init__(self, merged: MergedCopies, ready: ReadyPrograms, predictions: Predictions, placer: Placer) -> None:
        self._merged = merged
        self._ready = ready
        self._predictions = predictions
        self._placer = placer

    def plan(self, batch: Sequence[Pending], first: Pending, *, rare: bool) -> Plan:
        """A plan for ``batch``, or, if hot tasks run faster on merged copies, for the part of it that has ``first``.
        ``rare`` as ``ReadyPrograms.together`` says. Beside heavy deltas low-rank ones alone are no reason to leave."""
        if any(pending.row.heavy for pending in batch):
            return self._without_heavy(batch, first, rare=rare)
        return self._without_low_rank(self._placer.place(batch), first)

    def serving(self, plan: Plan) -> None:
        """Is told which plan will be computed."""
        self._merged.saves(plan.saved)

    def drop_copies(self) -> None:
        """Frees their memory."""
        self._merged.clear()

    def _without_heavy(self, batch: Sequence[Pending], first: Pending, *, rare: bool) -> Plan:
        """Any number of tasks with heavy deltas may leave: several together may make room for a smaller shape."""
        light, shapes = (self._ready.shapes(heavy=each, rare=rare) for each in (False, True))
        shapes += self._ready.shapes_of(frozenset(pending.sort for pending in batch))  # it may fit no taker
        owners = [pending.resident if pending.row.heavy else None for pending in batch]
        rows: dict[Resident, list[Row]] = {}
        for pending, owner in zip(batch, owners, strict=True):
            if owner is not None:
                rows.setdefault(owner, []).append(pending.row)
        seconds = {owner: self._predictions.certainly_added(own) for owner, own in rows.items()}
        lengths, copies = [pending.row.length for pending in batch], self._merged.copies
        dearest = dict(heapq.nlargest(MOST_DEAR, seconds.items(), key=itemgetter(1)))  # each is looked at by itself
        would_save = worth_taking_out(owners, lengths, dearest, light, shapes)
        held = {owner: cost for owner, cost in seconds.items() if owner in copies}
        apart = worth_taking_out(owners, lengths, held, light, shapes)
        mine = first.resident if first.resident in apart else None
        if mine is not None:
            part, copy = [p for p in batch if p.resident is mine], copies[mine]
        else:
            part, copy = [p for p in batch if p.resident not in apart], None
        running = {pending.resident for pending in part}
        saved = {owner: saved for owner, saved in would_save.items() if owner in running}
        return dataclasses.replace(self._placer.place(part, copy), saved=saved)

    def _without_low_rank(self, plan: Plan, first: Pending) -> Plan:
        """Each of the tasks with a good part of the batch leaves, or that with the largest, or none. Copies would save
        what they would in the best programs that can come; where those are not ready yet, the plan asks for one."""
        copies = self._merged.copies  # others come meanwhile: a plan without one would run on the bare backbone
        alone = self._alone(plan, copies)
        if not alone:
            return plan
        largest, *others = alone
        own = alone[largest]
        if largest in copies and len(own.pendings) == len(plan.pendings) and own.seconds < plan.seconds:
            return dataclasses.replace(own, saved={largest: plan.seconds - own.seconds})  # nothing is left behind
        sets = [[largest], list(alone)] if others else [[largest]]
        reach = self._placer.reach
        saved, leaving = max(
            ((self._gain(plan, [alone[owner] for owner in each], reach), each) for each in sets), key=itemgetter(0)
        )
        plan = dataclasses.replace(plan, saved=dict.fromkeys(leaving, saved / len(leaving)) if saved > 0 else {})
        held = [owner for owner in leaving if owner in copies]
        if not held or saved <= 0:
            return plan
        if self._gain(plan, [alone[owner] for owner in held], attrgetter("seconds")) > 0:
            if first.resident in held:
                return dataclasses.replace(alone[first.resident], saved={first.resident: saved / len(leaving)})
            kept = [pending for pending in plan.pendings if pending.resident not in held]
            return self._placer.place(kept)
        missing = max((alone[owner] for owner in held), key=lambda each: each.seconds - reach(each))
        if reach(missing) < missing.seconds and saved > plan.missed:
            return dataclasses.replace(plan, wanted=missing.wanted, missed=saved)
        return plan

    def _alone(self, plan: Plan, copies: Mapping[Resident, Params]) -> dict[Resident, Plan]:
        """Plans for the queries of tasks that a copy could serve, on the ``copies`` that there are or, to be weighed
        alone, on one that could be; those with most tokens first."""
        tokens = Counter[Resident]()
        for pending in plan.pendings:
            if pending.resident is not None and pending.resident.mergeable:
                tokens[pending.resident] += pending.row.length
        least = GOOD_PART * sum(pending.row.length for pending in plan.pendings)
        found = [owner for owner, count in tokens.most_common(MOST_APART) if count >= least]
        return {
            owner: self._placer.place(
                [pending for pending in plan.pendings if pending.resident is owner], copies.get(owner, {})
            )
            for owner in found
            if self._merged.may_have(owner)
        }

    def _gain(self, plan: Plan, leaving: Sequence[Plan], seconds: Callable[[Plan], float]) -> float:
        """Seconds that are saved if these parts of a plan run by themselves, beyond what predictions err by and the
        host takes for more batches; 0 or less where they should not."""
        gone = {pending.number for each in leaving for pending in each.pendings}
        rest = [pending for pending in plan.pendings if pending.number not in gone]
        left = seconds(self._placer.place(rest)) if rest else 0.0
        more = len(leaving) - (not rest)
        return seconds(plan) - left - sum(map(seconds, leaving)) / WORTHWHILE - more * HOST_SECONDS
