"""Plain XLA: one task at a time, unpack its mask, then a dense product (all at once, or unrolled, is slower)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.numerics import dot
from pallas_kernels.windows import Runs, over_runs


def apply_mask(w: Float[Array, "i o"], bits: UInt8[Array, "i o8"]) -> Float[Array, "i o"]:
    """W . M by AND-ing bit patterns: 0 or all ones a weight, which beats a select."""
    integer = jnp.int16 if w.dtype == jnp.bfloat16 else jnp.int32
    shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
    planes = ((bits[:, None, :] >> shifts) & 1).reshape(bits.shape[0], -1).astype(integer)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(w, integer) & -planes, w.dtype)


def masked_matmul_reference(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    w: Float[Array, "i o"],
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: int,
) -> Float[Array, "t o"]:
    """See ``masked_matmul``."""

    def body(x_window: Array, y_window: Array, slot: Array) -> Array:
        del y_window
        return dot(x_window, apply_mask(w, bits.at[slot, layer].get(mode="promise_in_bounds")))

    return over_runs(x, y, runs, size, body)
