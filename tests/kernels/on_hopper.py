"""Kernels for a GPU in tests: as they are where there is one, interpreted elsewhere, with an eye on races."""

from __future__ import annotations

import jax
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races  # not public yet, nor is the next one
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jpets.deltas.operators import CANDIDATES

INTERPRET = False if jax.default_backend() == "gpu" else InterpretGPUParams(detect_races=True)


def races() -> bool:
    """Whether two threads met in the kernel that was interpreted last."""
    return INTERPRET is not False and bool(get_races().races_found)


def candidates(operator: str) -> list[str]:
    """The names of an operator's candidates that run here as they are."""
    return [name for name in CANDIDATES[operator] if name != "mosaic" or INTERPRET is False]
