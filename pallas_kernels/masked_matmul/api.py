"""``masked_matmul``: for each run k of tokens, ``y[run] = x[run] @ (w * M[slot[k], layer])``; ``sign_matmul``:
``y[run] += scale[slot[k], layer] * x[run] @ S[slot[k], layer]`` with S of plus and minus one.

Bits lie in planes: bit k of byte c of a row stands for output column ``k * (out / 8) + c``, so that unpacking is eight
shifts of contiguous bytes and no shuffle.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, UInt8

from pallas_kernels.masked_matmul.batched import masked_matmul_batched, sign_matmul_batched
from pallas_kernels.masked_matmul.reference import (
    apply_mask,
    masked_matmul_reference,
    sign_matmul_reference,
    signs,
)
from pallas_kernels.numerics import LayerIndex
from pallas_kernels.windows import REFERENCE, Runs, combine_runs, replace

__all__ = ["MASKED", "SIGNED", "apply_mask", "masked_matmul", "pack_planes", "sign_matmul", "signs"]


def _masked_mosaic(*operands: Any, **settings: Any) -> Array:
    from pallas_kernels.masked_matmul.mosaic import masked_matmul_mosaic  # a quarter of a second, for GPUs alone

    return masked_matmul_mosaic(*operands, **settings)


def _sign_mosaic(*operands: Any, **settings: Any) -> Array:
    from pallas_kernels.masked_matmul.mosaic import sign_matmul_mosaic

    return sign_matmul_mosaic(*operands, **settings)


MASKED: Mapping[str, Callable[..., Array]] = {"batched": masked_matmul_batched, "mosaic": _masked_mosaic}
"""The candidates without a loop, by name: of (x, w, bits, runs, size, layer) each returns the runs' products [k, s, o].

What a candidate returns for a run that is not used, or past a run's length, means nothing. It takes all operands: what
it cannot compute itself it leaves to another candidate.
"""
SIGNED: Mapping[str, Callable[..., Array]] = {"batched": sign_matmul_batched, "mosaic": _sign_mosaic}
"""The same, of (x, bits, scale, runs, size, layer)."""


def masked_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    w: Float[Array, "i o"],
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
    candidate: str = REFERENCE,
) -> Float[Array, "t o"]:
    """``y`` with the runs' rows replaced by x (W . M_task) (MaskBert, PetS section 3.1), f32 [t, o].

    ``size`` is the largest run; o must be a multiple of 8.
    """
    if candidate == REFERENCE:
        return masked_matmul_reference(x, y, w, bits, runs, size, layer)
    return combine_runs(y, replace, MASKED[candidate](x, w, bits, runs, size, layer), runs)


def sign_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    bits: UInt8[Array, "slots layers i o8"],
    scale: Float[Array, "slots layers 1"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
    candidate: str = REFERENCE,
) -> Float[Array, "t o"]:
    """``y`` with s (x sign(D_task)) added on the runs' rows (BitDelta), f32 [t, o].

    A set bit is plus one. ``size`` is the largest run; o must be a multiple of 8.
    """
    if candidate == REFERENCE:
        return sign_matmul_reference(x, y, bits, scale, runs, size, layer)
    return combine_runs(y, operator.add, SIGNED[candidate](x, bits, scale, runs, size, layer), runs)


def pack_planes(mask: Bool[np.ndarray, "*b i o"]) -> UInt8[np.ndarray, "*b i c"]:
    """uint8 planes: c = o / 8."""
    *lead, o = mask.shape
    if o % 8:
        raise ValueError(f"a mask's output size must be a multiple of 8, got {o}")
    planes = mask.reshape(*lead, 8, o // 8).astype(np.uint8) << np.arange(8, dtype=np.uint8)[:, None]
    return np.asarray(planes.sum(-2), np.uint8)
