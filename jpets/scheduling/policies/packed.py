"""Token-budget packing: batches as full as they get, whatever the lengths in them.

Linear sites see packed tokens without padding, so lengths need not be alike. What is left to choose is the order in
which queries fill batches: by length (attention pads least), or task by task (heavy deltas are applied to fewer, fuller
runs, and light batches need no loops over heavy classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from jpets.scheduling.costs.batch_costs import BatchCosts
from jpets.scheduling.costs.exact_packing import TOKEN_STEP
from jpets.scheduling.queue import BARE, Batches, Ints, Queue

FEW = 64
"""Queries of which light ones are only spread: orders take time to plan."""
GOLDEN = (5**0.5 - 1) / 2
WELL_FILLED = 0.75
"""Share of a batch's tokens that are used in one that is left alone."""
__all__ = ["TOKEN_STEP", "orders", "packed"]


def packed(queue: Queue, costs: BatchCosts) -> Batches:
    """The cheapest plan, as predicted, over a few orders."""
    if len(queue) == 0:
        return []
    costs.check(int(queue.lengths.max()))
    if (whole := costs.whole(queue)) is not None:
        return [whole]
    plans = [plan for order, aparts in orders(queue, costs) for plan in costs.pack(queue, order, aparts)]
    best = min(plans, key=partial(costs.total, queue))
    pooled = _pooled(queue, best, costs)
    return min(best, pooled, key=partial(costs.total, queue))


def _pooled(queue: Queue, plan: Batches, costs: BatchCosts) -> Batches:
    """``plan`` with the queries of half-empty batches packed anew, together: each sort of queries leaves a rest."""
    rest = [batch for batch in plan if queue.lengths[batch.queries].sum() < WELL_FILLED * batch.tokens]
    if len(rest) < 2:
        return plan
    members = np.concatenate([batch.queries for batch in rest])
    order = members[np.argsort(queue.lengths[members], kind="stable")]
    (again,) = costs.pack(queue, order, [np.zeros(len(order), np.int_)])
    full = [batch for batch in plan if not any(batch is other for other in rest)]
    return [*full, *again]


def orders(queue: Queue, costs: BatchCosts) -> list[tuple[Ints, Sequence[Ints]]]:
    """Orders [n] in which queries may fill batches, each with what may not share a batch [n], in that order.

    By length, all together; or heavy ones task by task, apart from light ones or each heavy kind by itself. Rows that
    all have the same kind of heavy delta may share products, and light batches are spared the loops over heavy deltas.
    Light ones are ordered by length, which suits shapes for like lengths, or spread, so that every batch has some of
    all lengths, which fills shapes for mixtures.
    """
    heavy = costs.deltas.heavy[queue.kinds]
    by_length = np.argsort(queue.lengths, kind="stable")
    together = np.zeros(len(queue), np.int_)
    if len(queue) == 1:
        return [(by_length, [together])]
    rank = np.empty(len(queue), np.int_)
    rank[by_length] = spread(len(queue)) if costs.mixtures else np.arange(len(queue))
    if not heavy.any():
        return [(by_length, [together]), *([(np.argsort(rank), [together])] if costs.mixtures else [])]
    task, kind = np.where(heavy, queue.tasks, BARE), np.where(heavy, queue.kinds, BARE)
    found: list[tuple[Ints, Sequence[Ints]]] = [(by_length, [together])]
    mixed = np.where(heavy, queue.lengths, rank)
    for place in (queue.lengths, mixed) if costs.mixtures and len(queue) > FEW else (mixed,):
        by_task = np.lexsort((place, task, kind, ~heavy))
        found.append((by_task, [kind[by_task], heavy[by_task].astype(np.int_)]))
    return found


def spread(count: int) -> Ints:
    """A place [count] for each of ``count`` ordered things: the first of them in the new order are always evenly spread
    over the old one (the golden ratio's low-discrepancy sequence)."""
    return np.argsort(np.modf(np.arange(count) * GOLDEN)[0])
