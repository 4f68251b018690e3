"""No loop: the bits of many runs are gathered and unpacked at once, then one product a run in a batch of them.

By arithmetic, an H100 writes and reads each run's dense weight once, 4 bytes a weight: 28 MB a run and layer of
BERT-base, so at 3.35 TB/s 8 us, or 13 ms for 128 runs in twelve layers. A loop moves as much, and waits for the host
before each of the 9,216 steps. Runs share a launch as far as ``SCRATCH_BYTES`` holds their weights.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.masked_matmul.reference import apply_mask, signs
from pallas_kernels.numerics import LayerIndex, batched_dot
from pallas_kernels.windows import Runs, in_chunks, take_runs


def masked_matmul_batched(
    x: Float[Array, "t i"],
    w: Float[Array, "i o"],
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
) -> Float[Array, "k s o"]:
    """x (W . M_task) for each run's tokens."""

    def product(rows: Float[Array, "c s i"], slots: Int[Array, " c"]) -> Float[Array, "c s o"]:
        return batched_dot(rows, apply_mask(w, bits.at[slots, layer].get(mode="promise_in_bounds")))

    return in_chunks(product, take_runs(x, runs, size), runs.slots, w.nbytes)


def sign_matmul_batched(
    x: Float[Array, "t i"],
    bits: UInt8[Array, "slots layers i o8"],
    scale: Float[Array, "slots layers 1"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
) -> Float[Array, "k s o"]:
    """s (x sign(D_task)) for each run's tokens."""

    def product(rows: Float[Array, "c s i"], slots: Int[Array, " c"]) -> Float[Array, "c s o"]:
        own = signs(bits.at[slots, layer].get(mode="promise_in_bounds"), x.dtype)
        factors = scale.at[slots, layer].get(mode="promise_in_bounds")[:, None]
        return factors * batched_dot(rows, own)

    inputs, plane = bits.shape[-2:]
    return in_chunks(product, take_runs(x, runs, size), runs.slots, inputs * plane * 8 * jnp.dtype(x.dtype).itemsize)
