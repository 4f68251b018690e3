"""The same training at several learning rates, with the best result on held-out texts kept."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jpets.errors import InvalidInput
from jpets.training.data import Example
from jpets.training.plan import Training
from jpets.training.run import DIVERGED, UpdateReport
from jpets.training.session import Result, run_training
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
    report: Callable[[float | None, UpdateReport], None] = lambda rate, step: None,
    **how: Any,
) -> tuple[Result, float | None]:
    """``run_training`` at each rate (None: the method's own): the result with the least held-out loss, and its rate.

    A diverged result is never better than one that did not diverge. Raises ``InvalidInput`` if all diverged.
    """

    def run(number: int, rate: float | None) -> Result:
        own = dataclasses.replace(training, plan=dataclasses.replace(training.plan, rate=rate))
        place = folder / str(number) if folder is not None else None
        return run_training(
            id, backbone, own, examples, held_out, folder=place, report=lambda step: report(rate, step), **how
        )

    def loss(found: tuple[Result, float | None]) -> float:
        held_out = found[0].held_out
        return held_out if math.isfinite(held_out) else math.inf

    with shared_programs() if len(rates) > 1 else contextlib.nullcontext():
        best = min(((run(number, rate), rate) for number, rate in enumerate(rates)), key=loss)
    if not math.isfinite(best[0].held_out):
        raise InvalidInput(DIVERGED)
    return best


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Within it, runs that differ only in rates and seeds compile once: JAX's cache of compiled programs is in a
    temporary folder if the user has named none."""
    if jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="jpets-programs-") as folder:
        _keep_programs_in(folder)
        try:
            yield
        finally:
            _keep_programs_in(None)


def _keep_programs_in(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
