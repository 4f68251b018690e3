"""The settings of a training: what to train, and how."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jpets.config import DType
from jpets.deltas.recipe import FROZEN
from jpets.errors import InvalidInput
from jpets.types import Pooling, TruncationStrategy

SWEPT = 4
"""How many learning rates a sweep tries, evenly spread on a logarithmic scale."""


UPDATES = 100
"""Updates that training takes at least: with a few hundred texts three epochs would be only a handful."""
LEAST_EPOCHS, LEAST_OF_FEW, MOST_EPOCHS = 3, 4, 40
"""Epochs of many texts, of few, and at most."""
FEW_TEXTS = 4096
"""Number of texts below which batches are small, so that there are more updates for the same work."""
SMALL_BATCH, BATCH = 16, 32
LEAST_PATIENCE = 3
DEFAULT_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How to train. ``batch`` rows make one gradient, ``accumulate`` of them one update.

    Fields that are None are chosen by the number of texts: see ``settled``.
    """

    epochs: int | None = None
    batch: int | None = None
    accumulate: int = 1
    rate: float | None = None
    """Learning rate of the method's parameters; None: the method's own."""
    head_rate: float = 5e-3
    warm_up: float = 0.1
    """Share of the updates in which the learning rate rises; it falls as a cosine over the others."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of a gradient."""
    patience: int | None = None
    """Epochs without a better held-out score after which training stops."""
    dtype: DType = "bfloat16"
    """Number format of the forward pass; gradients and parameters stay in f32 (Micikevicius et al. 2018)."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class SettledPlan(TrainingPlan):
    """A plan for a known number of texts."""

    epochs: int = LEAST_EPOCHS
    batch: int = BATCH
    patience: int | None = None
    """None: training never stops early."""

    def per_epoch(self, texts: int) -> int:
        """The number of batches of this many texts; the last one may not be full."""
        return -(-texts // self.batch)


def settled(plan: TrainingPlan, texts: int) -> SettledPlan:
    """``plan`` for ``texts`` texts to train on; fields that are set stay.

    Batches are small if texts are few, and epochs as many as make ``UPDATES``. Training stops after half of the epochs
    without progress on the held-out texts.
    """
    if isinstance(plan, SettledPlan):
        return plan
    least, usual = (LEAST_OF_FEW, SMALL_BATCH) if texts < FEW_TEXTS else (LEAST_EPOCHS, BATCH)
    batch = plan.batch or usual
    per_epoch = max(1, -(-texts // batch))
    epochs = plan.epochs or min(MOST_EPOCHS, max(least, -(-UPDATES * plan.accumulate // per_epoch)))
    patience = plan.patience
    if patience is None and plan.epochs is None:
        patience = max(LEAST_PATIENCE, epochs // 2)
    given = {field.name: getattr(plan, field.name) for field in dataclasses.fields(TrainingPlan)}
    return SettledPlan(**{**given, "epochs": epochs, "batch": batch, "patience": patience})


@dataclasses.dataclass(frozen=True)
class Training:
    """What to train, and how. ``settings`` are the method's (rank, sites, bottleneck ...)."""

    method: str
    """One of ``methods.method_names()``."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: TrainingPlan = dataclasses.field(default_factory=TrainingPlan)
    held_out: float = 0.1
    """Share of the texts that is held out if no others are given, to stop early and to choose the best."""
    max_length: int | None = None
    """Tokens that texts are cut to, in training and when the task is asked; None: those of the task that training goes
    on from, else ``DEFAULT_LENGTH``."""
    pooling: Pooling = "mean"
    balanced: bool = False
    """Whether classes count equally, however often they occur."""
    problem: Literal["multi-label", "regression"] | None = None
    head: Literal["embedding"] | None = None
    """``embedding``: the examples are pairs of texts that belong together, or with labels that are their similarity."""
    domain: str | None = None
    """Where the backbone looks tokens up in tables: the domain of these."""
    truncation_strategy: TruncationStrategy | None = None
    """Which text of a pair is cut; None: as the task that training goes on from, else the longest first."""


def check_rates(sweep: str | None, rate: float | None, method: str) -> None:
    """Raises ``InvalidInput`` for both, for a sweep that is none, and for a ``method`` without numbers of its own."""
    rates_of(sweep, rate)
    if sweep is not None and rate is not None:
        raise InvalidInput("rate, sweep: expected one of them, found both")
    if method == FROZEN and (sweep is not None or rate is not None):
        raise InvalidInput(f"{FROZEN} trains the head alone, found a rate or a sweep of the method's; give head_rate")


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
