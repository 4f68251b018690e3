"""Batching policies: from the lengths of the waiting queries to batches of their indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jpets.scheduling.cost import Floats, Ints, Shape, span_costs

Batches = list[list[int]]


def split_by_cost(costs: Floats) -> list[tuple[int, int]]:
    """The split of n sorted queries into contiguous batches of least total cost, as (first, past the last) pairs.

    ``costs`` [n, most] as ``span_costs`` gives them. Bellman equation 5 of PetS: state[i] = min over k of
    state[i - k - 1] + cost(i - k .. i). Raises ``ValueError`` where some query fits in no batch.
    """
    n, most = costs.shape
    state = np.full(n + 1, np.inf)
    state[0] = 0.0
    back = np.zeros(n + 1, np.int64)
    for i in range(n):
        width = min(most, i + 1)
        totals = state[i - width + 1 : i + 1][::-1] + costs[i, :width]
        best = int(np.argmin(totals))
        state[i + 1], back[i + 1] = totals[best], best + 1
    if not np.isfinite(state[n]):
        raise ValueError("some query is longer than every shape holds")
    spans = []
    end = n
    while end > 0:
        spans.append((end - int(back[end]), end))
        end -= int(back[end])
    return spans[::-1]


def alpha(lengths: Sequence[int], shapes: Sequence[Shape], most: int) -> Batches:
    """Batches that minimise the summed cost of the shared part alone (PetS section 6.4, "alpha-only")."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    spans = split_by_cost(span_costs(np.asarray(lengths)[order], shapes, most))
    return [[int(q) for q in order[first:end]] for first, end in spans]


def fixed(lengths: Sequence[int], shapes: Sequence[Shape], most: int, size: int) -> Batches:
    """Batches of ``size`` in order of arrival, cut short where no shape holds the next query as well."""
    values: Ints = np.asarray(lengths)
    batches: Batches = []
    current: list[int] = []
    for q in range(len(values)):
        grown = [*current, q]
        if current and (len(grown) > min(size, most) or not _holds(values[grown], shapes)):
            batches.append(current)
            grown = [q]
        current = grown
    return [*batches, current] if current else batches


def _holds(lengths: npt.NDArray[np.int_], shapes: Sequence[Shape]) -> bool:
    ascending = np.sort(lengths)
    return bool(np.isfinite(span_costs(ascending, shapes, len(lengths))[-1, -1]))
