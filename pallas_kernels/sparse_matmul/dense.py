"""No loop and no addition of entries: each task's difference is laid out densely, then one product a run.

Places of a task's entries are unique, so they are written, not added, to a dense matrix of zeros, in their order: no
two writes meet, nothing is atomic, and equal inputs give equal bits. On an H100 a run's matrix is cleared, written and
read by the tensor core, 4 bytes a weight: 28 MB a run and layer of BERT-base, so 8 us at 3.35 TB/s. Adding up the terms
of entries instead, in runs of 128 tokens, would write and read 4 bytes for each entry and token: at a density of 0.5 %
as much (36 MB), and then sort out the columns: by prefix sums, which lose bits to cancellation, or by padded lists of
columns, which are 13 times as large for real supports.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, Num, UInt8, UInt16

from pallas_kernels.numerics import LayerIndex, batched_dot, take_slots, value_dtype
from pallas_kernels.sparse_matmul.columns import unpack_columns
from pallas_kernels.windows import Runs, in_chunks, take_runs


def sparse_matmul_dense(
    x: Float[Array, "t i"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
    outputs: int,
) -> Float[Array, "k s o"]:
    """x D_task for each run's tokens."""
    inputs, dtype = x.shape[1], value_dtype(values)

    def product(own: Float[Array, "c s i"], slots: Int[Array, " c"]) -> Float[Array, "c s o"]:
        places = _places(rows, cols, ends, slots, layer, (inputs, outputs))
        dense = _write(jnp.zeros((len(slots), outputs * inputs), dtype), places, take_slots(values, slots, layer))
        return _transposed_dot(own, dense.reshape(-1, outputs, inputs))

    return in_chunks(product, take_runs(x, runs, size), runs.slots, inputs * outputs * dtype.itemsize)


def block_sparse_matmul_dense(
    x: Float[Array, "t i"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
    outputs: int,
) -> Float[Array, "k s o"]:
    """x D_task for each run's tokens, D in blocks: each place of the grid gathers its block, or zeros."""
    inputs, dtype = x.shape[1], value_dtype(blocks)
    *_, count, side, _ = blocks.shape
    high, wide = inputs // side, outputs // side

    def product(own: Float[Array, "c s i"], slots: Int[Array, " c"]) -> Float[Array, "c s o"]:
        places = _places(rows, cols, ends, slots, layer, (high, wide))
        entry = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), places.shape)
        grid = _write(jnp.full((len(slots), wide * high), count, jnp.int32), places, entry)
        held = take_slots(blocks, slots, layer)
        run = jnp.arange(len(slots))[:, None]
        tiles = held.at[run, grid].get(mode="fill", fill_value=0).reshape(-1, wide, high, side, side)
        return batched_dot(own, tiles.transpose(0, 2, 3, 1, 4).reshape(-1, inputs, outputs))

    return in_chunks(product, take_runs(x, runs, size), runs.slots, inputs * outputs * dtype.itemsize)


def _places(
    rows: Array, cols: Array, ends: Array, slots: Int[Array, " c"], layer: LayerIndex, dims: tuple[int, int]
) -> Int[Array, "c n"]:
    """Each entry's place in the flattened transpose of a matrix of these dims, rising; behind it for padding."""
    row, col, end = (bank.at[slots, layer].get(mode="promise_in_bounds") for bank in (rows, cols, ends))
    inputs, outputs = dims
    column = unpack_columns(col, end)
    behind = inputs * outputs + jnp.arange(row.shape[1], dtype=jnp.int32)  # no two alike
    return jnp.where(column < outputs, column * inputs + row.astype(jnp.int32), behind)


def _write(empty: Num[Array, "c m"], places: Int[Array, "c n"], values: Num[Array, "c n"]) -> Num[Array, "c m"]:
    run = jnp.arange(len(empty), dtype=jnp.int32)[:, None]
    return empty.at[run, places].set(values, mode="drop", indices_are_sorted=True, unique_indices=True)


def _transposed_dot(x: Float[Array, "c s i"], w: Float[Array, "c o i"]) -> Float[Array, "c s o"]:
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    axes = (((2,), (2,)), ((0,), (0,)))
    return jax.lax.dot_general(x.astype(w.dtype), w, axes, precision=precision, preferred_element_type=jnp.float32)
