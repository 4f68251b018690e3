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

WELL_FILLED = 0.75
"""Share of a batch's tokens that are used in one that is left alone."""
__all__ = ["TOKEN_STEP", "orders", "packed"]


def packed(queue: Queue, costs: BatchCosts) -> Batches:
    """The cheapest plan, as predicted, over a few orders."""
    if len(queue) == 0:
        return []
    costs.check(int(queue.lengths.max()))
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

    By length, all together or heavy ones apart from light ones; or heavy ones task by task, apart from light ones or
    each heavy kind by itself. Rows that all have the same kind of heavy delta may share products, and light batches are
    spared the loops over heavy deltas.
    """
    heavy = costs.deltas.heavy[queue.kinds]
    by_length = np.argsort(queue.lengths, kind="stable")
    together = np.zeros(len(queue), np.int_)
    if not heavy.any() or len(queue) == 1:
        return [(by_length, [together])]
    task, kind = np.where(heavy, queue.tasks, BARE), np.where(heavy, queue.kinds, BARE)
    by_task = np.lexsort((queue.lengths, task, kind, ~heavy))
    light_last = np.lexsort((queue.lengths, ~heavy))
    loops = heavy[light_last].astype(np.int_)
    return [(by_length, [together]), (by_task, [kind[by_task], loops]), (light_last, [loops])]
