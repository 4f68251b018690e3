"""Whose queries run faster by themselves on a merged copy of the weights than in the mixed batch (PetS section 7)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from jpets.scheduling.cost import Shape
from jpets.scheduling.ready import batch_cost

Owner = TypeVar("Owner", bound=Hashable)


def worth_taking_out(
    owners: Sequence[Owner | None],
    lengths: Sequence[int],
    added: Mapping[Owner, float],
    light: Sequence[Shape],
    shapes: Sequence[Shape],
) -> dict[Owner, float]:
    """Seconds that a batch saves by running an owner's queries without their heavy delta, in a batch of their own.

    ``owners`` of its queries, None for light ones; ``added`` is what the heavy deltas of those who could leave cost in
    it. The dearest is asked first, and the next about what is left. ``light`` shapes take queries without heavy deltas,
    ``shapes`` take all.
    """
    left = list(range(len(lengths)))

    def cost(members: Sequence[int]) -> float:
        loops = any(owners[q] is not None for q in members)
        return batch_cost(np.array([lengths[q] for q in members]), shapes if loops else light) if members else 0.0

    saved: dict[Owner, float] = {}
    for owner in sorted(added, key=lambda each: -added[each]):
        own = [q for q in left if owners[q] == owner]
        others = [q for q in left if owners[q] != owner]
        alone = batch_cost(np.array([lengths[q] for q in own]), light)
        gain = added[owner] + cost(left) - cost(others) - alone
        if gain > 0:
            saved[owner] = gain
            left = others
    return saved
