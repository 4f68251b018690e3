"""Costs over exact shapes: for every batch there is a program of its own shape, as the papers assume.

A server compiles few shapes and plans by ``ReadyCosts``; these costs are the upper bound that it is compared to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jpets.scheduling.costs.batch_costs import BatchCosts, Limits
from jpets.scheduling.costs.deltas import ClassNames, DeltaTables
from jpets.scheduling.costs.exact_packing import attention_groups, fill, rounded_tokens
from jpets.scheduling.costs.measured_profile import CostProfile, attention_cells, ceil_to
from jpets.scheduling.queue import Batch, Batches, Bools, Floats, Ints, Queue

__all__ = ["Costs", "Limits"]

ROW_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTH_STEP = 8
BUDGET_SHARES = (1.0, 0.5, 0.25)
"""Token budgets that ``pack`` tries, as shares of the limit."""
SMALL_QUEUE = 128
"""Most queries for which ``auto`` tries every policy: trying batch sizes takes longer than all others, and wins only by
what rounding leaves over."""


class Costs(BatchCosts):
    """A profile's costs within ``limits``.

    ``alpha`` [rows + 1, longest + 1] is the cost of n rows of up to l tokens, rounded up to a padded shape; infinite
    beyond the limits.
    """

    mixtures = False

    def __init__(
        self, profile: CostProfile, limits: Limits, kinds: Sequence[ClassNames] = (), *, length_step: int = LENGTH_STEP
    ) -> None:
        unknown = sorted({name for kind in kinds for name in kind if name not in profile.beta})
        if unknown:
            raise ValueError(f"the cost profile has no figures for {unknown}; profile with tasks of these kinds")
        self.profile = profile
        self.limits = limits
        n, length = np.arange(limits.rows + 1), np.arange(limits.longest + 1)
        self.rows_up = ceil_to([*(step for step in ROW_STEPS if step < limits.rows), limits.rows], n)
        self.rows_up[0] = 0
        self.lengths_up = -(-length // length_step) * length_step
        alpha = profile.alpha.at(self.rows_up, self.lengths_up)
        beyond = self.rows_up[:, None] * self.lengths_up[None, :] > limits.tokens
        beyond[1] = False  # a single query always has a shape, even where rounding it up passes the limit
        self.alpha = np.where(beyond, np.inf, alpha)
        self.alpha[0] = 0.0
        self.deltas = DeltaTables(profile, kinds, rows=limits.rows, longest=limits.longest, tokens=limits.tokens)

    @property
    def beta(self) -> Floats:
        """The delta cost of one task's padded rows [kinds + 1, rows + 1, longest + 1]."""
        return self.deltas.padded

    @property
    def alone(self) -> Bools:
        return np.isfinite(self.alpha)

    def prefix(self, lengths: Ints) -> int:
        longest = np.maximum.accumulate(lengths[: self.limits.rows])
        fits = np.isfinite(self.alpha[np.arange(1, len(longest) + 1), longest])
        return len(fits) if fits.all() else int(fits.argmin())

    def spans(self, queue: Queue, parts: Sequence[Ints], most: int) -> Floats:
        rows = min(most, self.limits.rows)
        sums = np.concatenate([[0], np.cumsum([len(each) for each in parts])])
        longest = np.array([int(queue.lengths[each[-1]]) for each in parts])
        n = len(parts)
        ends, back = np.arange(n)[:, None], np.arange(min(n, rows))[None, :]
        starts = np.maximum(ends - back, 0)
        size = sums[ends + 1] - sums[starts]
        valid = (ends >= back) & (size <= rows)
        return np.where(valid, self.alpha[np.minimum(size, rows), longest[:, None]], np.inf)

    def batch(self, queue: Queue, queries: Ints) -> Batch:
        """These queries in the padded shape that holds them."""
        n, length = int(self.rows_up[len(queries)]), int(self.lengths_up[queue.lengths[queries].max()])
        return Batch(queries, n * length, ((n, length),))

    def whole(self, queue: Queue) -> Batch | None:
        return None

    def pack(self, queue: Queue, order: Ints, aparts: Sequence[Ints]) -> list[Batches]:
        lengths = queue.lengths[order]
        budgets = sorted({max(self.limits.longest, int(share * self.limits.tokens)) for share in BUDGET_SHARES})
        plans = []
        for apart in aparts:
            filled = [fill(lengths, apart, budget, self.limits.rows) for budget in budgets]
            batch = min(filled, key=lambda each: self._estimate(queue, order, each))
            parts = np.split(order, np.flatnonzero(np.diff(batch)) + 1)
            shapes = zip(parts, rounded_tokens(lengths, batch), attention_groups(lengths, batch), strict=True)
            plans.append([Batch(part, int(tokens), groups) for part, tokens, groups in shapes])
        return plans

    def further_policies(self, queue: Queue, seconds: float) -> Literal["all", "quick", "none"]:
        return "all" if len(queue) <= SMALL_QUEUE else "quick"

    def _estimate(self, queue: Queue, order: Ints, batch: Ints) -> float:
        """Predicted seconds, with attention reckoned without padding."""
        lengths = queue.lengths[order]
        cells = np.bincount(batch, weights=lengths.astype(float) ** 2)
        shared = self.profile.packed_seconds(rounded_tokens(lengths, batch), cells)
        return self.with_deltas(queue, order, batch, shared, np.zeros(len(shared), np.int_))

    def shared(self, plan: Batches) -> Floats:
        """Predicted seconds of each batch's shared part: alpha."""
        seconds = np.empty(len(plan))
        packed = []
        for at, batch in enumerate(plan):
            n, length = batch.groups[0]
            if batch.padded and n <= self.limits.rows:
                seconds[at] = self.alpha[n, min(length, self.limits.longest)]
            else:
                packed.append(at)
        if packed:
            tokens = np.array([plan[at].tokens for at in packed])
            cells = np.array([attention_cells(plan[at].groups) for at in packed])
            seconds[packed] = self.profile.packed_seconds(tokens, cells)
        return seconds

    def with_deltas(self, queue: Queue, queries: Ints, batch: Ints, shared: Floats, padded_to: Ints) -> float:
        """Predicted seconds of a plan (PetS equation 3): ``queries[i]`` runs in batch ``batch[i]``, whose shared part
        costs ``shared[batch[i]]``: more with loops over heavy classes, less where all rows have one kind, and it
        replaces weights. ``padded_to`` is the length of a batch's rows, 0 where it is packed: its deltas then see no
        padding."""
        kinds, tasks = queue.kinds[queries], queue.tasks[queries]
        loops = np.bincount(batch, weights=self.deltas.heavy[kinds], minlength=len(shared)) > 0
        first, last = np.full(len(shared), len(self.deltas.heavy)), np.full(len(shared), -2)
        np.minimum.at(first, batch, kinds)
        np.maximum.at(last, batch, kinds)
        saved = np.where(first == last, self.deltas.replaced[np.where(first == last, first, 0)], 0.0)
        most = int(tasks.max()) + 2
        pairs, at = np.unique(batch * most + tasks + 1, return_inverse=True)
        rows = np.bincount(at, minlength=len(pairs))
        tokens = np.bincount(at, weights=queue.lengths[queries], minlength=len(pairs)).astype(np.int_)
        longest, kind = np.zeros(len(pairs), np.int_), np.zeros(len(pairs), np.int_)
        np.maximum.at(longest, at, queue.lengths[queries])
        kind[at] = kinds
        delta = self.deltas.of_tasks(pairs // most, kind, rows, tokens, longest, padded_to)
        return float((shared * (1 + self.profile.heavy_loop * loops - saved)).sum() + delta)

    def total(self, queue: Queue, plan: Batches) -> float:
        """Predicted seconds of a plan."""
        if not plan:
            return 0.0
        batch = np.repeat(np.arange(len(plan)), [len(each.queries) for each in plan])
        queries = np.concatenate([each.queries for each in plan])
        padded_to = np.array([each.groups[0][1] if each.padded else 0 for each in plan])
        return self.with_deltas(queue, queries, batch, self.shared(plan), padded_to)
