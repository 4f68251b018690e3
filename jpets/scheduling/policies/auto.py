"""``auto``: the policy whose plan is predicted to take least time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from jpets.scheduling.costs.policy_lookup import Costs
from jpets.scheduling.policies.offline import BUFFER_SIZES, alpha, beta, coordinated, fixed, length_buffer, turbo
from jpets.scheduling.policies.packed import packed
from jpets.scheduling.queue import Batches, Queue

FIXED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Policy(Protocol):
    def __call__(self, queue: Queue, costs: Costs) -> Batches: ...


class Chosen(NamedTuple):
    """A plan and the name of the policy that made it."""

    policy: str
    plan: Batches


def best_size(
    policy: Callable[[Queue, Costs, int], Batches], sizes: tuple[int, ...], queue: Queue, costs: Costs
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
SMALL_QUEUE = 128
QUICK = ("packed", "alpha", "coordinated", "beta")
"""What ``auto`` chooses from for more than ``SMALL_QUEUE`` queries; trying batch sizes takes longer than all of these,
and wins only by what rounding leaves over."""


def auto(queue: Queue, costs: Costs) -> Chosen:
    """The plan that is predicted to take least time."""
    names = POLICIES if len(queue) <= SMALL_QUEUE else QUICK
    plans = {name: POLICIES[name](queue, costs) for name in names}
    best = min(plans, key=lambda name: costs.total(queue, plans[name]))
    return Chosen(best, plans[best])
