"""Costs as the policies look them up: dense tables over the static shapes that there are programs for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpets.scheduling.costs.measured_profile import CostProfile, attention_cells, ceil_to
from jpets.scheduling.queue import Batch, Batches, Bools, Floats, Ints, Queue

ROW_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTH_STEP = 8
ClassNames = tuple[str, ...]
"""The delta classes of a task, as the profile names them."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one batch may hold. ``longest`` is the longest query in tokens."""

    rows: int
    tokens: int
    longest: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.longest < 1 or self.tokens < self.longest:
            raise ValueError(
                f"a batch must take at least one query of {self.longest} tokens, got {self.rows} rows and "
                f"{self.tokens} tokens"
            )


class Costs:
    """A profile's costs within ``limits``.

    ``alpha`` [rows + 1, longest + 1] is the cost of n rows of up to l tokens, rounded up to a padded shape; infinite
    beyond the limits. ``beta`` [kinds + 1, rows + 1, longest + 1] is the delta cost of one task's padded rows,
    ``beta_packed`` [kinds + 1, tokens + 1] that of its packed tokens. The last entry of both, for the bare backbone
    (kind -1), is zero.
    """

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
        self.beta = np.zeros((len(kinds) + 1, limits.rows + 1, limits.longest + 1))
        self.beta_packed = np.zeros((len(kinds) + 1, limits.tokens + 1))
        for index, kind in enumerate(kinds):
            for name in kind:
                self.beta[index, 1:] += profile.beta[name].at(n[1:], length)
                self.beta_packed[index] += profile.packed_delta_seconds(name, limits.tokens)
        self.heavy = np.array([*(not profile.heavy.isdisjoint(kind) for kind in kinds), False])
        self.replaced = np.array(
            [*(max((profile.replaced.get(name, 0.0) for name in kind), default=0.0) for kind in kinds), 0.0]
        )

    def padded_batch(self, queries: Ints, longest: int) -> Batch:
        """These queries of up to ``longest`` tokens, in the padded shape that holds them."""
        n, length = int(self.rows_up[len(queries)]), int(self.lengths_up[longest])
        return Batch(queries, n * length, ((n, length),))

    def check(self, length: int) -> None:
        """Raises ``ValueError`` for a query that no shape holds."""
        if length > self.limits.longest:
            raise ValueError(f"a query of {length} tokens is longer than every shape holds ({self.limits.longest})")

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

    def with_deltas(self, queue: Queue, queries: Ints, batch: Ints, shared: Floats, packed: Bools) -> float:
        """Predicted seconds of a plan (PetS equation 3): ``queries[i]`` runs in batch ``batch[i]``, whose shared part
        costs ``shared[batch[i]]``: more with loops over heavy classes, less where all rows have one kind, and it
        replaces weights. Deltas in a ``packed`` batch see no padding."""
        kinds, tasks = queue.kinds[queries], queue.tasks[queries]
        loops = np.bincount(batch, weights=self.heavy[kinds], minlength=len(shared)) > 0
        first, last = np.full(len(shared), len(self.heavy)), np.full(len(shared), -2)
        np.minimum.at(first, batch, kinds)
        np.maximum.at(last, batch, kinds)
        saved = np.where(first == last, self.replaced[np.where(first == last, first, 0)], 0.0)
        most = int(tasks.max()) + 2
        pairs, at = np.unique(batch * most + tasks + 1, return_inverse=True)
        rows = np.bincount(at, minlength=len(pairs))
        tokens = np.bincount(at, weights=queue.lengths[queries], minlength=len(pairs)).astype(np.int_)
        longest, kind = np.zeros(len(pairs), np.int_), np.zeros(len(pairs), np.int_)
        np.maximum.at(longest, at, queue.lengths[queries])
        kind[at] = kinds
        own = packed[pairs // most]
        delta = self.beta_packed[kind[own], tokens[own]].sum() + self.beta[kind, rows, longest][~own].sum()
        return float((shared * (1 + self.profile.heavy_loop * loops - saved)).sum() + delta)

    def total(self, queue: Queue, plan: Batches) -> float:
        """Predicted seconds of a plan."""
        if not plan:
            return 0.0
        batch = np.repeat(np.arange(len(plan)), [len(each.queries) for each in plan])
        queries = np.concatenate([each.queries for each in plan])
        packed = np.array([not each.padded for each in plan])
        return self.with_deltas(queue, queries, batch, self.shared(plan), packed)
