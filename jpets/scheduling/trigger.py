"""When to start planning: at once, or when waiting longer stops paying (TurboTransformers section 5)."""

from __future__ import annotations


def lazy_wait(
    *, oldest_waited: float, waiting: int, predicted: float, timeout: float, size: int, latency_target: float
) -> float:
    """Seconds that a lazy server should still wait for more queries; 0 starts now.

    It starts when ``size`` queries wait, when the oldest has waited ``timeout``, or when the oldest's wait plus the
    batch's ``predicted`` time passes half the latency target.
    """
    if waiting >= size:
        return 0.0
    return max(0.0, min(timeout - oldest_waited, latency_target / 2 - predicted - oldest_waited))
