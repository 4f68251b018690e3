"""Hopper: one launch for all runs; each thread of a warpgroup holds one token (Mosaic GPU).

A block takes a tile of tokens of one task, and a strip of columns. It walks the non-zeros of these columns in the order
of the list and adds to sums in shared memory. No two threads share a sum: there are no atomic additions, and equal
inputs give equal bits. Inputs and sums lie transposed, a tile of tokens after the other, so that a warp reads and
writes neighbouring numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num, UInt8, UInt16

from pallas_kernels.hopper import SEMANTICS
from pallas_kernels.numerics import take_slots
from pallas_kernels.sparse_matmul.columns import unpack_columns
from pallas_kernels.sparse_matmul.dense import block_sparse_matmul_dense, sparse_matmul_dense
from pallas_kernels.windows import Runs, take_runs

TOKENS = 128
"""Threads of a warpgroup."""
STRIPS = (32, 16, 8)
"""Columns that a block may take: a strip's sums are at most 16 KiB, so that a multiprocessor holds many blocks."""
BLOCKS = 1024
"""Blocks of a launch from which on a strip need not be narrower: about eight for each multiprocessor. On an H200, 384
blocks of 32 columns took 17 us for 123 non-zeros each, a few at a time: they wait for memory, not for each other."""
UNGUARDED = dataclasses.replace(SEMANTICS, unsafe_no_auto_barriers=True)
"""No barrier around each access to shared memory: a thread adds to its own sums alone."""
AT_ONCE = 8
"""Non-zeros whose inputs are asked for before the first is added: reading them takes longest."""


def takes(y: Any, side: int = 1) -> bool:
    """Whether the kernels take outputs, an array or its shape, of this size in blocks of ``side``."""
    return _strip(y.shape[1], side) is not None


def sparse_matmul_mosaic(
    x: Float[Array, "t i"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: int,
    outputs: int,
    *,
    interpret: Any = False,
) -> Float[Array, "k s o"]:
    """x D_task for each run's tokens; the dense form where the kernel does not take them. ``interpret`` runs it on the
    CPU."""
    if _strip(outputs, 1) is None:
        return sparse_matmul_dense(x, rows, cols, ends, values, runs, size, layer, outputs)
    lists = (rows, cols, ends, values[..., None, None])
    return _launch("sparse_matmul", x, *lists, runs, size, layer, outputs, interpret)


def block_sparse_matmul_mosaic(
    x: Float[Array, "t i"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: int,
    outputs: int,
    *,
    interpret: Any = False,
) -> Float[Array, "k s o"]:
    """As ``sparse_matmul_mosaic``, D in blocks."""
    if _strip(outputs, blocks.shape[-1]) is None:
        return block_sparse_matmul_dense(x, rows, cols, ends, blocks, runs, size, layer, outputs)
    return _launch("block_sparse_matmul", x, rows, cols, ends, blocks, runs, size, layer, outputs, interpret)


def _strip(outputs: int, side: int, tiles: int = 1) -> int | None:
    """The widest strip of which there are enough for ``tiles`` tiles of tokens, or the narrowest."""
    fitting = [n for n in STRIPS if outputs % n == 0 and n % side == 0]
    return next((n for n in fitting if tiles * (outputs // n) >= BLOCKS), min(fitting, default=None))


def _launch(
    name: str,
    x: Float[Array, "t i"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: int,
    outputs: int,
    interpret: Any,
) -> Float[Array, "k s o"]:
    side, capacity, tiles = blocks.shape[-1], len(runs.slots), -(-size // TOKENS)
    strip = _strip(outputs, side, capacity * tiles)
    assert strip is not None
    tokens = take_runs(x, runs, tiles * TOKENS).reshape(capacity * tiles, TOKENS, -1)
    own = [bank.at[runs.slots, layer].get(mode="promise_in_bounds") for bank in (rows, cols, ends)]
    own_rows, own_cols = own[0], unpack_columns(*own[1:]).astype(jnp.uint16)
    edges = jnp.arange(0, outputs // side + 1, strip // side, dtype=jnp.uint16)
    bounds = jax.vmap(lambda each: jnp.searchsorted(each, edges, method="scan_unrolled"))(own_cols)  # no loop
    block = _Block(strip, side, tiles)
    kernel = pl.kernel(
        block.body,
        out_type=jax.ShapeDtypeStruct((capacity * tiles, outputs, TOKENS), jnp.float32),
        mesh=plgpu.Mesh(grid=(capacity * tiles, outputs // strip), grid_names=("tile", "strip")),
        compiler_params=UNGUARDED,
        interpret=interpret,
        name=name,
    )
    lengths = jnp.where(jnp.arange(capacity) < runs.used, runs.lengths, 0)
    lists = (own_rows, own_cols, take_slots(blocks, runs.slots, layer))
    sums = kernel(lengths, bounds.astype(jnp.int32), tokens.swapaxes(1, 2), *lists)
    return sums.swapaxes(1, 2).reshape(capacity, tiles * TOKENS, outputs)[:, :size]


class _Block(NamedTuple):
    """What one block of the grid does."""

    strip: int
    side: int
    tiles: int
    """Of a run."""

    def body(self, lengths: Any, bounds: Any, inputs: Any, rows: Any, cols: Any, blocks: Any, out: Any) -> None:
        tile, strip = jax.lax.axis_index("tile"), jax.lax.axis_index("strip")
        run, first = jax.lax.div(tile, self.tiles), strip * self.strip

        def scope(sums: Any) -> None:
            for column in range(self.strip):  # one by one, so that each thread clears what it will add to
                sums[column] = jnp.zeros(TOKENS, jnp.float32)
            begin, end = bounds[run, strip], bounds[run, strip + 1]
            at_once = max(1, AT_ONCE // self.side)

            def group(number: Array, carry: Array) -> Array:
                entries = [begin + number * at_once + i for i in range(at_once)]
                places = [(run, jnp.minimum(entry, end - 1)) for entry in entries]
                starts = [cols[at].astype(jnp.int32) * self.side - first for at in places]
                terms = [self._inputs(inputs.at[tile], rows[at].astype(jnp.int32)) for at in places]
                for entry, at, start, own in zip(entries, places, starts, terms, strict=True):
                    self._add(sums, start, entry < end, blocks.at[at], own)
                return carry

            jax.lax.fori_loop(0, pl.cdiv(end - begin, at_once), group, jnp.int32(0))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums, out.at[tile, pl.ds(first, self.strip)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jax.lax.rem(tile, self.tiles) * TOKENS < lengths[run])
        def _() -> None:
            pl.run_scoped(scope, plgpu.SMEM((self.strip, TOKENS), jnp.float32))

    def _inputs(self, inputs: Any, row: Array) -> list[Float[Array, " lanes"]]:
        return [inputs[row * self.side + i].astype(jnp.float32) for i in range(self.side)]

    def _add(self, sums: Any, first: Array, inside: Array, block: Any, inputs: list[Array]) -> None:
        def column(number: Array, carry: Array) -> Array:
            total = sums[first + number]
            for row, each in enumerate(inputs):
                total += jnp.where(inside, block[row, number].astype(jnp.float32), 0.0) * each
            sums[first + number] = total
            return carry

        jax.lax.fori_loop(0, self.side, column, jnp.int32(0))
