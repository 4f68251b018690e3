"""The settings of a training run."""

from __future__ import annotations

import dataclasses

from jpets.config import DType


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
