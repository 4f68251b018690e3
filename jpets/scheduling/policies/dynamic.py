"""The best split of an ordered queue into neighbours, for any cost of a batch."""

from __future__ import annotations

import numpy as np

from jpets.scheduling.queue import Floats, Ints


def last_least(totals: Floats) -> Ints:
    """The place of the least number along the last axis; of equal ones the last.

    Batches stand in the order of their size, and PetS's Algorithm 1 tries the largest first and replaces it only by
    what is strictly less (lines 10 to 12, 21 to 24).
    """
    return totals.shape[-1] - 1 - totals[..., ::-1].argmin(axis=-1)


def split_by_cost(costs: Floats) -> list[tuple[int, int]]:
    """The split of n ordered items into contiguous batches of least total cost, as (first, past the last) pairs.

    ``costs`` [n, most]: entry (i, k) is the cost of items i - k .. i as one batch, infinite where they cannot be one.
    Bellman equation 5 of PetS: state[i] = min over k of state[i - k - 1] + cost(i - k .. i); ties go to the larger
    batch, as in Algorithm 1. Raises ``ValueError`` where some item fits in no batch.
    """
    n, most = costs.shape
    state = np.full(n + 1, np.inf)
    state[0] = 0.0
    back = np.zeros(n + 1, np.int64)
    for i in range(n):
        width = min(most, i + 1)
        totals = state[i - width + 1 : i + 1][::-1] + costs[i, :width]
        best = int(last_least(totals))
        state[i + 1], back[i + 1] = totals[best], best + 1
    if not np.isfinite(state[n]):
        raise ValueError("some query is longer than every shape holds")
    spans = []
    end = n
    while end > 0:
        spans.append((end - int(back[end]), end))
        end -= int(back[end])
    return spans[::-1]
