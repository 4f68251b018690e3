"""Batching over the static shapes that can run now: how a server plans, which has a fixed menu of programs.

Shapes are packed or padded, with up to three attention groups; ``span_costs`` says what each span of queries costs.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from jpets.scheduling.costs.shape import Shape, span_costs
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
    spans = split_by_cost(span_costs(np.asarray(lengths)[order], shapes, most))
    return [[int(q) for q in order[first:end]] for first, end in spans]


def in_turn(lengths: Sequence[int], shapes: Sequence[Shape], most: int, size: int) -> Batches:
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


def heavy_apart(
    lengths: Sequence[int], heavy: Sequence[bool], light_shapes: Sequence[Shape], shapes: Sequence[Shape], most: int
) -> Batches:
    """The cheaper of two plans by ``cheapest_split``: all queries together, or those with heavy deltas by themselves.

    ``light_shapes`` take any query that is not heavy, ``shapes`` take all. Batches without heavy queries are spared the
    loops over heavy classes.
    """
    values, apart = np.asarray(lengths, np.int_), np.asarray(heavy, bool)
    if apart.all() or not apart.any():
        return cheapest_split(lengths, shapes if apart.any() else light_shapes, most)
    together = cheapest_split(lengths, shapes, most)
    parts = [
        [members[batch].tolist() for batch in cheapest_split(values[members].tolist(), own, most)]
        for members, own in ((np.flatnonzero(~apart), light_shapes), (np.flatnonzero(apart), shapes))
    ]
    separate = sum(_cost(values, part, own) for part, own in zip(parts, (light_shapes, shapes), strict=True))
    return [*parts[0], *parts[1]] if separate < _cost(values, together, shapes) else together


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


def _cost(lengths: Ints, batches: Batches, shapes: Sequence[Shape]) -> float:
    return sum(batch_cost(lengths[batch], shapes) for batch in batches)


def batch_cost(lengths: Ints, shapes: Sequence[Shape]) -> float:
    """The cost of these queries as one batch; infinite where no shape holds them."""
    ordered = sorted(map(int, lengths))
    return min((shape.seconds for shape in shapes if _fits(ordered, shape)), default=np.inf)


def _fits(lengths: Sequence[int], shape: Shape) -> bool:
    """Whether a shape has room for these ascending lengths, each in the shortest group that is long enough."""
    if lengths[-1] > shape.groups[-1][1] or not (shape.padded or sum(lengths) <= shape.tokens):
        return False
    first = 0
    for rows, limit in shape.groups:
        past = bisect.bisect_right(lengths, limit)
        if past - first > rows:
            return False
        first = past
    return True


def _holds(lengths: Ints, shapes: Sequence[Shape]) -> bool:
    return bool(np.isfinite(batch_cost(lengths, shapes)))
