"""When a shape holds queries, straight from the definition."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.scheduling.costs.shape import Shape


def holds(lengths: Sequence[int], shape: Shape) -> bool:
    """Straight from the definition: each query goes to the shortest group that is long enough."""
    taken = [0] * len(shape.groups)
    for length in lengths:
        fitting = [g for g, (_, longest) in enumerate(shape.groups) if length <= longest]
        if not fitting:
            return False
        taken[fitting[0]] += 1
    fits = all(count <= n for count, (n, _) in zip(taken, shape.groups, strict=True))
    return fits and (shape.padded or sum(lengths) <= shape.tokens)
