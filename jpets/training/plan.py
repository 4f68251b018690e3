"""The settings of a training run."""

from __future__ import annotations

import dataclasses
import math

from jpets.config import DType
from jpets.errors import InvalidInput

SWEPT = 4
"""Learning rates that a sweep tries, evenly spread on a logarithmic scale."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train. ``batch`` rows make one gradient, ``accumulate`` of them one update."""

    epochs: int = 3
    batch: int = 32
    accumulate: int = 1
    rate: float | None = None
    """Of the method's parameters; None: what suits the method."""
    head_rate: float = 1e-3
    warm_up: float = 0.1
    """Share of the updates in which the learning rate rises; it falls as a cosine over the others."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of a gradient."""
    patience: int | None = None
    """Epochs without a better held-out score after which training stops."""
    dtype: DType = "bfloat16"
    """Of the forward pass; gradients and parameters stay in f32 (Micikevicius et al. 2018)."""
    seed: int = 0


def rates_of(sweep: str | None, rate: float | None) -> list[float | None]:
    """``rate`` alone, or those of ``LOW..HIGH``, also as ``rate=LOW..HIGH``. Raises ``InvalidInput``."""
    if sweep is None:
        return [rate]
    name, _, span = sweep.rpartition("=")
    low, dots, high = span.partition("..")
    try:
        first, last = float(low), float(high)
    except ValueError:
        first = last = math.nan
    if name not in ("", "rate", "lr") or not dots or not 0 < first < last < math.inf:
        raise InvalidInput(f"a sweep must be rate=LOW..HIGH with numbers above 0, found {sweep!r}")
    return [first * (last / first) ** (at / (SWEPT - 1)) for at in range(SWEPT)]
