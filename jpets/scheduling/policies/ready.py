"""Batches over the shapes that can run now, for what is decided beside a policy: floods, and what is put off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpets.scheduling.costs.shape import Shape, ShapeTable, span_costs
from jpets.scheduling.order.fairness import fill
from jpets.scheduling.policies.dynamic import split_by_cost
from jpets.scheduling.queue import Ints

Batches = list[list[int]]
PUT_OFF = 2.0
"""To put queries off must save so many times what their tokens cost in a full batch: the next one may not be full."""


def cheapest_split(lengths: Sequence[int], shapes: Sequence[Shape], most: int) -> Batches:
    """Batches of at most ``most`` queries of like length that minimise the summed cost of their shapes.

    On padded shapes this is PetS's "alpha-only" policy (section 6.4); packed ones let a batch hold what its tokens and
    groups allow. Raises ``ValueError`` where some query fits no shape.
    """
    if not len(lengths):
        return []
    order = np.argsort(np.asarray(lengths), kind="stable")
    ordered = np.split(np.asarray(lengths)[order], np.arange(1, len(order)))
    spans = split_by_cost(span_costs(ordered, shapes, most))
    return [[int(q) for q in order[first:end]] for first, end in spans]


def well_filled(batch: Sequence[int], lengths: Sequence[int], shapes: Sequence[Shape], most: int) -> list[int]:
    """``batch``, or its most urgent queries alone where these fit a smaller shape much better.

    For a device that is busy, with more to come: queries that are put off join a later batch. Lower indices are more
    urgent; the first of them stays.
    """
    urgent = sorted(batch)
    rate = min(shape.seconds / shape.tokens for shape in shapes)
    tried: list[tuple[float, list[int]]] = []
    for shape in sorted(shapes, key=lambda shape: shape.seconds):
        tried.append((shape.seconds, fill(urgent, lengths, shape, most)))
        if len(tried[-1][1]) == len(urgent):
            break
    whole, _ = tried[-1]

    def gain(option: tuple[float, list[int]]) -> float:
        seconds, kept = option
        put_off = sum(lengths[q] for q in set(urgent).difference(kept))
        return whole - seconds - PUT_OFF * rate * put_off

    # The whole batch comes first: a part that gains nothing does not displace it.
    return max((option for option in reversed(tried) if urgent[0] in option[1]), key=gain)[1]


def batch_cost(lengths: Ints, shapes: Sequence[Shape]) -> float:
    """The cost of these queries as one batch; infinite where no shape holds them."""
    return min((shape.seconds for shape in ShapeTable(shapes).holding(sorted(map(int, lengths)))), default=np.inf)
