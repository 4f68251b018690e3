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
from jaxtyping import Array, Float, Int, Int32, Num, UInt8, UInt16

from pallas_kernels.hopper import SEMANTICS
from pallas_kernels.numerics import take_slots
from pallas_kernels.sparse_matmul.columns import unpack_columns
from pallas_kernels.windows import Runs

TOKENS = 128
"""Threads of a warpgroup."""
STRIPS = (32, 16, 8)
"""Columns that a block may take: a strip's sums are at most 16 KiB, so that a multiprocessor holds many blocks."""
UNGUARDED = dataclasses.replace(SEMANTICS, unsafe_no_auto_barriers=True)
"""No barrier around each access to shared memory: a thread adds to its own sums alone."""
AT_ONCE = 8
"""Non-zeros whose inputs are asked for before the first is added: reading them takes longest."""


def takes(y: Any, side: int = 1) -> bool:
    """Whether the kernels take outputs, an array or its shape, of this size in blocks of ``side``."""
    return _strip(y.shape[1], side) is not None


def sparse_matmul_mosaic(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: int,
    *,
    interpret: Any = False,
) -> Float[Array, "t o"]:
    """See ``sparse_matmul``; sizes that it ``takes``. ``interpret`` runs it on the CPU."""
    return _launch("sparse_matmul", x, y, rows, cols, ends, values[..., None, None], runs, size, layer, interpret)


def block_sparse_matmul_mosaic(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: int,
    *,
    interpret: Any = False,
) -> Float[Array, "t o"]:
    """See ``block_sparse_matmul``; sizes that it ``takes``. ``interpret`` runs it on the CPU."""
    return _launch("block_sparse_matmul", x, y, rows, cols, ends, blocks, runs, size, layer, interpret)


class _Tiles(NamedTuple):
    """Runs cut into tiles of at most ``TOKENS`` tokens. A token of no run has a place past the last tile."""

    slots: Int[Array, " n"]
    tokens: Int[Array, "n lanes"]
    places: Int[Array, " t"]
    used: Int[Array, " n"]


def _tiles(runs: Runs, tokens: int, size: int) -> _Tiles:
    capacity = len(runs.slots)
    count = min(capacity * -(-size // TOKENS), capacity + tokens // TOKENS)
    lengths = jnp.where(jnp.arange(capacity) < runs.used, runs.lengths, 0)
    own_tiles = -(-lengths // TOKENS)
    ends = jnp.cumsum(own_tiles)
    tile = jnp.arange(count, dtype=jnp.int32)
    run = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), capacity - 1)
    number = tile - (ends - own_tiles)[run]
    lane = number[:, None] * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    used = tile < ends[-1]
    own = used[:, None] & (lane < lengths[run][:, None])
    token = jnp.where(own, (runs.starts + runs.offsets)[run][:, None] + lane, tokens)
    places = jnp.full(tokens, count * TOKENS, jnp.int32)
    places = places.at[token.ravel()].set(jnp.arange(token.size, dtype=jnp.int32), mode="drop")
    return _Tiles(runs.slots[run], token, places, used.astype(jnp.int32))


def _strip(outputs: int, side: int) -> int | None:
    return next((n for n in STRIPS if outputs % n == 0 and n % side == 0), None)


def _launch(
    name: str,
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: int,
    interpret: Any,
) -> Float[Array, "t o"]:
    side, outputs = blocks.shape[-1], y.shape[1]
    strip = _strip(outputs, side)
    assert strip is not None
    tiles = _tiles(runs, len(y), size)
    inputs = x.at[tiles.tokens].get(mode="clip").swapaxes(1, 2)
    own = [bank.at[tiles.slots, layer].get(mode="promise_in_bounds") for bank in (rows, cols, ends)]
    own_rows, own_cols = own[0], unpack_columns(*own[1:]).astype(jnp.uint16)
    edges = jnp.arange(0, outputs // side + 1, strip // side, dtype=jnp.uint16)
    bounds = jax.vmap(lambda each: jnp.searchsorted(each, edges))(own_cols).astype(jnp.int32)
    block = _Block(strip, side)
    kernel = pl.kernel(
        block.body,
        out_type=jax.ShapeDtypeStruct((len(tiles.slots), outputs, TOKENS), jnp.float32),
        mesh=plgpu.Mesh(grid=(len(tiles.slots), outputs // strip), grid_names=("tile", "strip")),
        compiler_params=UNGUARDED,
        interpret=interpret,
        name=name,
    )
    sums = kernel(tiles.used, bounds, inputs, own_rows, own_cols, take_slots(blocks, tiles.slots, layer))
    sums = sums.swapaxes(1, 2).reshape(-1, outputs)
    found = sums.at[tiles.places].get(mode="clip")
    return jnp.where(tiles.places[:, None] < len(sums), y + found, y)


class _Block(NamedTuple):
    """What one block of the grid does."""

    strip: int
    side: int

    def body(self, used: Any, bounds: Any, inputs: Any, rows: Any, cols: Any, blocks: Any, out: Any) -> None:
        tile, strip = jax.lax.axis_index("tile"), jax.lax.axis_index("strip")
        first = strip * self.strip

        def scope(sums: Any) -> None:
            for column in range(self.strip):  # one by one, so that each thread clears what it will add to
                sums[column] = jnp.zeros(TOKENS, jnp.float32)
            begin, end = bounds[tile, strip], bounds[tile, strip + 1]
            at_once = max(1, AT_ONCE // self.side)

            def group(number: Array, carry: Array) -> Array:
                entries = [begin + number * at_once + i for i in range(at_once)]
                places = [(tile, jnp.minimum(entry, end - 1)) for entry in entries]
                starts = [cols[at].astype(jnp.int32) * self.side - first for at in places]
                terms = [self._inputs(inputs.at[tile], rows[at].astype(jnp.int32)) for at in places]
                for entry, at, start, own in zip(entries, places, starts, terms, strict=True):
                    self._add(sums, start, entry < end, blocks.at[at], own)
                return carry

            jax.lax.fori_loop(0, pl.cdiv(end - begin, at_once), group, jnp.int32(0))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums, out.at[tile, pl.ds(first, self.strip)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(used[tile] != 0)
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
