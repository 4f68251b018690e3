"""``auto``: the policy whose plan is predicted to take least time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from jpets.scheduling.costs.batch_costs import BatchCosts
from jpets.scheduling.policies.offline import BUFFER_SIZES, alpha, beta, coordinated, fixed, length_buffer, turbo
from jpets.scheduling.policies.packed import packed
from jpets.scheduling.queue import Batches, Queue

FIXED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Policy(Protocol):
    def __call__(self, queue: Queue, costs: BatchCosts) -> Batches: ...


class Chosen(NamedTuple):
    """A plan and the name of the policy that made it."""

    policy: str
    plan: Batches


def best_size(
    policy: Callable[[Queue, BatchCosts, int], Batches], sizes: tuple[int, ...], queue: Queue, costs: BatchCosts
) -> Batches:
    """The cheapest plan, as predicted, over a policy's batch sizes."""
    usable = [size for size in sizes if size <= costs.limits.rows]
    return min((policy(queue, costs, size) for size in usable), key=partial(costs.total, queue))


POLICIES: Mapping[str, Policy] = {
    "fixed": partial(best_size, fixed, FIXED_SIZES),
    "alpha": alpha,
    "beta": beta,
    "coordinated": coordinated,
    "turbo": turbo,
    "packed": packed,
    "length-buffer": partial(best_size, length_buffer, BUFFER_SIZES),
}
"""Policies by name. ``fixed`` and ``length-buffer`` take the size that is predicted to be best."""
QUICK = ("packed", "alpha", "coordinated", "beta")
"""The policies of one pass over the queue."""


def auto(queue: Queue, costs: BatchCosts) -> Chosen:
    """The plan that is predicted to take least time, as far as comparing plans pays."""
    plans = {"packed": packed(queue, costs)}
    seconds = {"packed": costs.total(queue, plans["packed"])}
    names = {"all": tuple(POLICIES), "quick": QUICK, "none": ()}[costs.further_policies(queue, seconds["packed"])]
    for name in names:
        if name not in plans:
            plans[name] = POLICIES[name](queue, costs)
            seconds[name] = costs.total(queue, plans[name])
    best = min(plans, key=seconds.__getitem__)
    return Chosen(best, plans[best])
