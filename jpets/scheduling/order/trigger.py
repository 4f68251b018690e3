"""When to start planning: at once, or when waiting longer stops paying (TurboTransformers section 5)."""

from __future__ import annotations

import math

MARGIN = 0.005
"""Seconds that planning, assembling and answering may take beside the predicted time before a deadline."""


def lazy_wait(
    *,
    oldest_waited: float,
    waiting: int,
    predicted: float,
    timeout: float,
    size: int,
    latency_target: float,
    left: float = math.inf,
) -> float:
    """Seconds that a lazy server should still wait for more queries; 0 starts now.

    It starts when ``size`` queries wait, when the oldest has waited ``timeout``, when the oldest's wait plus the
    batch's ``predicted`` time passes half the latency target, or when the earliest deadline, ``left`` seconds from
    now, would be missed by waiting longer.
    """
    if waiting >= size:
        return 0.0
    until_target = latency_target / 2 - predicted - oldest_waited
    return max(0.0, min(timeout - oldest_waited, until_target, left - predicted - MARGIN))
