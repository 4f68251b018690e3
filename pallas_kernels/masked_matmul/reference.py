"""Plain XLA: one task at a time, unpack its mask, then a dense product (all at once, or unrolled, is slower)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.numerics import LayerIndex, dot
from pallas_kernels.windows import Runs, over_runs


def _unpack(bits: UInt8[Array, "*b i o8"]) -> UInt8[Array, "*b i o"]:
    """Zeros and ones."""
    shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
    return ((bits[..., None, :] >> shifts) & 1).reshape(*bits.shape[:-1], -1)


def apply_mask(w: Float[Array, "i o"], bits: UInt8[Array, "*b i o8"]) -> Float[Array, "*b i o"]:
    """W . M by AND-ing bit patterns: 0 or all ones a weight, which beats a select."""
    integer = jnp.int16 if w.dtype == jnp.bfloat16 else jnp.int32
    planes = _unpack(bits).astype(integer)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(w, integer) & -planes, w.dtype)


def signs(bits: UInt8[Array, "*b i o8"], dtype: jnp.dtype) -> Float[Array, "*b i o"]:
    """Plus one where a bit is set, minus one elsewhere: the bit pattern of one with its sign bit flipped."""
    integer, top = (jnp.uint16, 15) if dtype == jnp.bfloat16 else (jnp.uint32, 31)
    one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), integer)
    return jax.lax.bitcast_convert_type(one ^ ((_unpack(bits) ^ 1).astype(integer) << top), dtype)


def masked_matmul_reference(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    w: Float[Array, "i o"],
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
) -> Float[Array, "t o"]:
    """See ``masked_matmul``."""

    def body(x_window: Array, y_window: Array, slot: Array, weights: Array) -> Array:
        del y_window
        return dot(x_window, apply_mask(weights, bits.at[slot, layer].get(mode="promise_in_bounds")))

    return over_runs(x, y, runs, size, body, w)


def sign_matmul_reference(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    bits: UInt8[Array, "slots layers i o8"],
    scale: Float[Array, "slots layers 1"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
) -> Float[Array, "t o"]:
    """See ``sign_matmul``."""

    def body(x_window: Array, y_window: Array, slot: Array) -> Array:
        own = signs(bits.at[slot, layer].get(mode="promise_in_bounds"), x.dtype)
        return y_window + scale.at[slot, layer, 0].get(mode="promise_in_bounds") * dot(x_window, own)

    return over_runs(x, y, runs, size, body)
