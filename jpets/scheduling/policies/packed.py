"""Token-budget packing: batches as full as they get, whatever the lengths in them.

Linear sites see packed tokens without padding, so lengths need not be alike; attention pads within at most three groups
of like lengths. What is left to choose is the order in which queries fill batches: by length (attention pads least), or
task by task (heavy deltas are applied to fewer, fuller runs, and light batches need no loops over heavy classes).
"""

from __future__ import annotations

import numpy as np

from jpets.scheduling.costs.policy_lookup import Costs
from jpets.scheduling.queue import BARE, Batch, Batches, Floats, Groups, Ints, Queue

TOKEN_STEP = 64
BUDGET_SHARES = (1.0, 0.5, 0.25)
"""Token budgets that are tried, as shares of the limit."""
GROUP_LENGTHS = np.array([8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512])
"""Lengths that an attention group may have: a plan must not need too many programs."""
GROUP_PRICE = 0.1
"""A further attention group must save this share of the attention positions."""


def packed(queue: Queue, costs: Costs) -> Batches:
    """The cheapest plan, as predicted, over a few orders and token budgets."""
    if len(queue) == 0:
        return []
    costs.check(int(queue.lengths.max()))
    budgets = sorted({max(costs.limits.longest, int(share * costs.limits.tokens)) for share in BUDGET_SHARES})
    filled = [
        (order, fill(queue.lengths[order], apart, budget, costs))
        for order, apart in orders(queue, costs)
        for budget in budgets
    ]
    best: tuple[Ints, Ints] = min(filled, key=lambda each: _estimate(queue, each[0], each[1], costs))
    return _batches(queue, *best, costs)


def orders(queue: Queue, costs: Costs) -> list[tuple[Ints, Ints | None]]:
    """Orders in which queries may fill batches: by length; heavy ones task by task and the others apart.

    With an order whose heavy kinds are to have batches of their own comes each query's heavy kind, in that order.
    """
    heavy = costs.heavy[queue.kinds]
    by_length = np.argsort(queue.lengths, kind="stable")
    if not heavy.any():
        return [(by_length, None)]
    task = np.where(heavy, queue.tasks, BARE)
    heavy_kind = np.where(heavy, queue.kinds, BARE)
    by_task = np.lexsort((queue.lengths, task, heavy_kind, ~heavy))
    return [(by_length, None), (by_task, heavy_kind[by_task]), (np.lexsort((queue.lengths, ~heavy)), None)]


def fill(lengths: Ints, apart: Ints | None, budget: int, costs: Costs) -> Ints:
    """Each query's batch [n]: neighbours, as many as ``budget`` tokens and the limit of rows take.

    A batch also ends where ``apart`` [n] changes: rows that all have the same kind of heavy delta may share products.
    """
    ends = np.cumsum(lengths)
    borders = np.array([len(lengths)]) if apart is None else np.append(np.flatnonzero(np.diff(apart)) + 1, len(lengths))
    batch = np.zeros(len(lengths), np.int_)
    first = number = 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        border = int(borders[np.searchsorted(borders, first, side="right")])
        end = min(int(np.searchsorted(ends, before + budget, side="right")), first + costs.limits.rows, border)
        batch[first:end] = number
        first, number = end, number + 1
    return batch


def _tokens(lengths: Ints, batch: Ints) -> Ints:
    sums = np.bincount(batch, weights=lengths).astype(np.int_)
    return -(-sums // TOKEN_STEP) * TOKEN_STEP


def _estimate(queue: Queue, order: Ints, batch: Ints, costs: Costs) -> float:
    """Predicted seconds, with attention reckoned without padding."""
    lengths = queue.lengths[order]
    cells = np.bincount(batch, weights=lengths.astype(float) ** 2)
    shared = costs.profile.packed_seconds(_tokens(lengths, batch), cells)
    return costs.with_deltas(queue, order, batch, shared, np.ones(len(shared), bool))


def _batches(queue: Queue, order: Ints, batch: Ints, costs: Costs) -> Batches:
    lengths = queue.lengths[order]
    tokens = _tokens(lengths, batch)
    edges = np.flatnonzero(np.diff(batch)) + 1
    parts = np.split(order, edges)
    groups = attention_groups(lengths, batch)
    return [Batch(part, int(t), shape) for part, t, shape in zip(parts, tokens, groups, strict=True)]


def attention_groups(lengths: Ints, batch: Ints) -> list[Groups]:
    """For each batch the one to three groups with the fewest attention positions, sum of N L^2.

    A row belongs to the shortest group that is long enough. Lengths and numbers of rows come from ladders.
    """
    longest = int(lengths.max())
    ladder = np.append(GROUP_LENGTHS[longest > GROUP_LENGTHS], _ladder_up(longest))
    steps, count = len(ladder), int(batch.max()) + 1
    taken = np.bincount(batch * steps + np.searchsorted(ladder, lengths), minlength=count * steps).reshape(count, steps)
    upto = np.pad(taken.cumsum(1), ((0, 0), (1, 0)))  # [B, S + 1]: rows of the first s steps
    last = steps - (taken[:, ::-1] > 0).argmax(1)
    i, j = np.triu_indices(steps + 1)  # ends of the first two groups; i == 0 or i == j: the group is empty
    sizes = np.stack([upto[:, i], upto[:, j] - upto[:, i], upto[np.arange(count), last][:, None] - upto[:, j]], axis=-1)
    ends = np.append(0, ladder)
    lengths_at = np.stack(np.broadcast_arrays(ends[i][None], ends[j][None], ends[last][:, None]), axis=-1)
    rows = _rows_up(np.maximum(sizes, 0))
    cells: Floats = (rows * lengths_at.astype(float) ** 2).sum(-1) * (1 + GROUP_PRICE * ((rows > 0).sum(-1) - 1))
    cells[j[None, :] > last[:, None]] = np.inf
    chosen = cells.argmin(1)
    return [
        tuple((int(n), int(length)) for n, length in zip(rows[b, c], lengths_at[b, c], strict=True) if n)
        for b, c in enumerate(chosen)
    ]


def _rows_up(rows: Ints) -> Ints:
    """Rows that a group gets: the next sixteenth of a power of two, at most an eighth too many."""
    step = 2 ** np.maximum(np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int_) - 4, 0)
    return -(-rows // step) * step


def _ladder_up(longest: int) -> int:
    """The first group length that takes ``longest`` tokens; past the ladder's end, multiples of 64."""
    at = int(np.searchsorted(GROUP_LENGTHS, longest))
    return int(GROUP_LENGTHS[at]) if at < len(GROUP_LENGTHS) else -(-longest // 64) * 64
