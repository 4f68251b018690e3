"""Tasks whose queries run faster alone, on a merged copy of the weights, than in the mixed batch (PetS section 7)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.policies.ready import batch_cost

Owner = TypeVar("Owner", bound=Hashable)


def worth_taking_out(
    owners: Sequence[Owner | None],
    lengths: Sequence[int],
    added: Mapping[Owner, float],
    light: Sequence[Shape],
    shapes: Sequence[Shape],
) -> dict[Owner, float]:
    """Seconds that a batch saves by running some owners' queries without heavy deltas, in batches of their own.

    ``owners`` has each query's task, None for light ones; ``added`` the cost, in this batch, of the heavy deltas of
    each owner that could leave. The dearest owners leave, as many as save most. Several together may let the batch fit
    a smaller shape where one alone does not, so each is said to save an equal part. ``light`` shapes take queries
    without heavy deltas, ``shapes`` take all. What no shape takes has no cost, so nothing is said of it.
    """

    def cost(members: Sequence[int]) -> float:
        loops = any(owners[q] is not None for q in members)
        return batch_cost(np.array([lengths[q] for q in members]), shapes if loops else light) if members else 0.0

    left = list(range(len(lengths)))
    before, alone = cost(left), 0.0
    best: tuple[float, list[Owner]] = (0.0, [])
    dearest = sorted(added, key=lambda each: -added[each])
    for count, owner in enumerate(dearest, 1):
        own = [q for q in left if owners[q] == owner]
        left = [q for q in left if owners[q] != owner]
        alone += batch_cost(np.array([lengths[q] for q in own]), light) - added[owner]
        saved = before - cost(left) - alone
        if math.isfinite(saved):
            best = max(best, (saved, dearest[:count]), key=lambda option: option[0])
    most, leaving = best
    return dict.fromkeys(leaving, most / len(leaving)) if leaving else {}
