"""A policy's batch, with room made for the parties whose turn it is."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from jpets.scheduling.costs.shape import Shape


def fill(candidates: Iterable[int], lengths: Sequence[int], shape: Shape, most: int) -> list[int]:
    """Of ``candidates`` (indices into ``lengths``), in order, those that fit ``shape`` beside the ones before them."""
    limits = [limit for _, limit in shape.groups]
    rows = [count for count, _ in shape.groups]
    tokens = shape.tokens
    batch: list[int] = []
    room = min(most, sum(rows))
    for q in candidates:
        if len(batch) == room:
            break
        group = bisect_left(limits, lengths[q])
        if group < len(rows) and rows[group] and (shape.padded or lengths[q] <= tokens):
            rows[group] -= 1
            tokens -= lengths[q]
            batch.append(q)
    return batch


def fair_batch(
    chosen: Sequence[int], parties: Sequence[Hashable], lengths: Sequence[int], shapes: Sequence[Shape], most: int
) -> list[int]:
    """The batch ``chosen`` from a window of queries, with room made for parties that it passes over.

    The window stands most urgent first (``order.interleave``), ``parties`` and ``lengths`` describe its queries, and
    ``chosen`` holds query 0. A policy that sorts by length may fill a batch with one tenant although another's turn has
    come. Here each party is owed as many rows as it has among the first ``len(chosen)`` of the window. A party that got
    fewer adds its most urgent queries, as far as they fit the cheapest shape that holds ``chosen``; they replace the
    least urgent queries of parties that got more. So the batch costs what the policy expected. With one party the
    policy's choice stands.
    """
    few = lacking(chosen, parties)
    if not few:
        return list(chosen)
    holding = [shape for shape in shapes if len(fill(chosen, lengths, shape, most)) == len(chosen)]
    cheapest = min(holding, key=lambda shape: shape.seconds)
    passed = sorted(set(range(len(chosen))).difference(chosen))
    claims = _take((q for q in passed if lengths[q] <= cheapest.groups[-1][1]), parties, few)
    deserved = _take(sorted(chosen), parties, Counter(parties[: len(chosen)]))
    rest = sorted(set(chosen).difference(deserved))
    return fill([*deserved, *claims, *rest], lengths, cheapest, most)


def lacking(chosen: Sequence[int], parties: Sequence[Hashable]) -> Counter[Hashable]:
    """The rows that each party is owed and does not have in ``chosen``."""
    return Counter(parties[: len(chosen)]) - Counter(parties[q] for q in chosen)


def _take(candidates: Iterable[int], parties: Sequence[Hashable], allowed: Counter[Hashable]) -> list[int]:
    """The first of each party's candidates, as many as it is allowed."""
    left = Counter(allowed)
    taken = []
    for q in candidates:
        if left[parties[q]] > 0:
            left[parties[q]] -= 1
            taken.append(q)
    return taken
