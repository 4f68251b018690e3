"""The papers' batching policies: from a queue and its costs to batches. They pad every row to its batch's longest.

All are pure. A plan's batches hold each query once; which of them runs first is the caller's choice. A query that is
longer than every shape raises ``ValueError``.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jpets.scheduling.costs.batch_costs import BatchCosts
from jpets.scheduling.policies.dynamic import last_least, split_by_cost
from jpets.scheduling.queue import Batches, Ints, Queue

TURBO_ROWS = 20
"""Most rows of a batch in TurboTransformers' evaluation (section 6.2)."""
BUFFER_SIZES = (1, 2, 4, 8, 16, 32)
BUFFER_BIN = 8
"""Tokens of one length bin (Student Parallelism section B.4.2)."""


def fixed(queue: Queue, costs: BatchCosts, size: int) -> Batches:
    """Batches of ``size`` in order of arrival, cut short where no shape holds the next query as well."""
    plan: Batches = []
    first = 0
    while first < len(queue):
        lengths = queue.lengths[first : first + size]
        costs.check(int(lengths[0]))
        beyond = lengths > costs.limits.longest
        count = costs.prefix(lengths[: int(beyond.argmax())] if beyond.any() else lengths)
        plan.append(costs.batch(queue, np.arange(first, first + count)))
        first += count
    return plan


def alpha(queue: Queue, costs: BatchCosts, most: int | None = None) -> Batches:
    """Batches that minimise the summed cost of the shared part alone (PetS section 6.4, "alpha-only").

    A query is a mini-batch of its own; ``most`` bounds the rows of a batch.
    """
    order = np.argsort(queue.lengths, kind="stable")
    return _macro_batches(queue, np.split(order, np.arange(1, len(order))), costs, most)


def turbo(queue: Queue, costs: BatchCosts) -> Batches:
    """TurboTransformers Algorithm 3: least sum of cost per request times size, at most 20 a batch.

    A batch's cost over its size, times its size, is its cost: done rightly the algorithm is ``alpha`` with a cap.
    """
    return alpha(queue, costs, TURBO_ROWS)


def beta(queue: Queue, costs: BatchCosts) -> Batches:
    """Every mini-batch of step 1 as a batch of its own (PetS section 6.4, "beta-only")."""
    return [costs.batch(queue, each) for each in mini_batches(queue, costs)]


def coordinated(queue: Queue, costs: BatchCosts) -> Batches:
    """PetS Algorithm 1: mini-batches within tasks by beta, then macro-batches of those by alpha."""
    minis = mini_batches(queue, costs)
    return _macro_batches(queue, sorted(minis, key=lambda each: int(queue.lengths[each].max())), costs, None)


def length_buffer(queue: Queue, costs: BatchCosts, size: int) -> Batches:
    """Student Parallelism section B.4.2: a query joins the newest element of its length bin while that has less than
    ``size`` rows, else it becomes the tail; elements run first in, first out.

    Bins end at multiples of 8 tokens.
    """
    elements: deque[list[int]] = deque()
    newest: dict[int, list[int]] = {}
    for q, length in enumerate(queue.lengths.tolist()):
        end = -(-length // BUFFER_BIN) * BUFFER_BIN
        element = newest.get(end)
        padded = min(end, costs.limits.longest)
        costs.check(length)
        if element is None or len(element) >= size or not costs.alone[len(element) + 1, padded]:
            element = newest[end] = []
            elements.append(element)
        element.append(q)
    return [costs.batch(queue, np.array(each)) for each in elements]


def mini_batches(queue: Queue, costs: BatchCosts) -> list[Ints]:
    """Step 1 of PetS Algorithm 1 (equation 4): each task's queries, ordered by length, split so that the summed delta
    cost is least. Ties go to the larger mini-batch, as in the listing.

    All tasks advance together, one query of each a step.
    """
    if len(queue) == 0:
        return []
    costs.check(int(queue.lengths.max()))
    order = np.lexsort((queue.lengths, queue.tasks))
    firsts = np.flatnonzero(np.diff(queue.tasks[order], prepend=queue.tasks[order[0]] - 1))
    counts = np.diff(firsts, append=len(order))
    groups, most = len(firsts), min(int(counts.max()), costs.limits.rows)
    state = np.full((groups, int(counts.max()) + 1), np.inf)
    state[:, 0] = 0.0
    back = np.zeros(state.shape, np.int64)
    for j in range(state.shape[1] - 1):
        active = np.flatnonzero(counts > j)
        longest = queue.lengths[order[firsts[active] + j]]
        kinds = queue.kinds[order[firsts[active] + j]]
        sizes = np.arange(1, min(most, j + 1) + 1)
        price = costs.deltas.padded[kinds[:, None], sizes[None, :], longest[:, None]]
        price = np.where(costs.alone[sizes[None, :], longest[:, None]], price, np.inf)
        totals = state[active][:, j + 1 - sizes] + price
        best = last_least(totals)
        state[active, j + 1] = totals[np.arange(len(active)), best]
        back[active, j + 1] = best + 1
    found: list[Ints] = []
    for group, (first, end) in enumerate(zip(firsts, counts, strict=True)):
        while end > 0:
            found.append(order[first + end - back[group, end] : first + end])
            end -= back[group, end]
    return found


def _macro_batches(queue: Queue, minis: list[Ints], costs: BatchCosts, most: int | None) -> Batches:
    """Step 2 of PetS Algorithm 1 (equation 5): neighbours of ``minis``, which ascend in their longest query, batched so
    that the summed cost of the shared part is least."""
    if not len(queue):
        return []
    costs.check(int(queue.lengths.max()))
    shared = costs.spans(queue, minis, most or costs.limits.rows)
    return [costs.batch(queue, np.concatenate(minis[first:end])) for first, end in split_by_cost(shared)]
