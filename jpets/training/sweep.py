"""The same training at several learning rates, of which the best on held-out texts is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jpets.training.data import Example
from jpets.training.run import Step
from jpets.training.session import Result, Training, run_training
from jpets.types import LoadedBackbone


def best_of(
    rates: Sequence[float | None],
    id: str,
    backbone: LoadedBackbone,
    training: Training,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    *,
    folder: Path | None = None,
    report: Callable[[float | None, Step], None] = lambda rate, step: None,
    **how: Any,
) -> tuple[Result, float | None]:
    """``run_training`` at each rate (None: the method's own): the result of least held-out loss, and its rate.

    One that diverged is never the best beside one that did not.
    """
    best: tuple[float, Result, float | None] | None = None
    for number, rate in enumerate(rates):
        own = dataclasses.replace(training, plan=dataclasses.replace(training.plan, rate=rate))
        result = run_training(
            id,
            backbone,
            own,
            examples,
            held_out,
            folder=folder / str(number) if folder is not None else None,
            report=lambda step, rate=rate: report(rate, step),  # type: ignore[misc]
            **how,
        )
        held = result.held_out if math.isfinite(result.held_out) else math.inf
        if best is None or held < best[0]:
            best = held, result, rate
    assert best is not None
    return best[1:]
