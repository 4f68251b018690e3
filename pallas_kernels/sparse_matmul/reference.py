"""Plain XLA: gather the inputs that meet a non-zero or a block, multiply them, add them up by column."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num, UInt8, UInt16

from pallas_kernels.numerics import LayerIndex, batched_dot, take_slots
from pallas_kernels.sparse_matmul.columns import unpack_columns
from pallas_kernels.windows import Runs, over_runs

PARTS = 2
"""A CPU does one scatter on one core; two at once, each on half of the tokens, are up to 40 % faster (four gain little
more, and take longer to compile)."""


def sparse_matmul_reference(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
) -> Float[Array, "t o"]:
    """See ``sparse_matmul``."""

    def body(x_window: Array, y_window: Array, slot: Array) -> Array:
        row, col = _places(rows, cols, ends, slot, layer)
        value = take_slots(values, slot[None], layer)[0].astype(jnp.float32)
        # XLA would read through a plain transpose, from a cache line for each number; that of pieces it writes out.
        inputs = jnp.concatenate([half.T for half in jnp.array_split(x_window.astype(jnp.float32), 2, axis=1)])
        parts = []
        for part in jnp.array_split(inputs, min(PARTS, size), axis=1):
            terms = part.at[row].get(mode="fill", fill_value=0) * value[:, None]
            sums = jnp.zeros((y_window.shape[1], part.shape[1]), jnp.float32)
            parts.append(sums.at[col].add(terms, indices_are_sorted=True, mode="drop"))
        return y_window + jnp.concatenate([part.T for part in parts])

    return over_runs(x, y, runs, size, body)


def _places(rows: Array, cols: Array, ends: Array, slot: Array, layer: LayerIndex) -> tuple[Array, Array]:
    """Row and column of each of a slot's entries."""
    row, col, end = (bank.at[slot, layer].get(mode="promise_in_bounds") for bank in (rows, cols, ends))
    return row.astype(jnp.int32), unpack_columns(col, end)


def block_sparse_matmul_reference(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
) -> Float[Array, "t o"]:
    """See ``block_sparse_matmul``."""
    side = blocks.shape[-1]

    def body(x_window: Array, y_window: Array, slot: Array) -> Array:
        row, col = _places(rows, cols, ends, slot, layer)
        inputs = x_window.reshape(len(x_window), -1, side).swapaxes(0, 1)  # [i / b, s, b]
        terms = batched_dot(inputs.at[row].get(mode="fill", fill_value=0), take_slots(blocks, slot[None], layer)[0])
        sums = jnp.zeros((y_window.shape[1] // side, *terms.shape[1:]), jnp.float32)
        sums = sums.at[col].add(terms, indices_are_sorted=True, mode="drop")
        return y_window + sums.swapaxes(0, 1).reshape(y_window.shape)

    return over_runs(x, y, runs, size, body)
