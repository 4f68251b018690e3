"""Hopper: one launch for all runs; bits meet the weight in shared memory, next to the tensor core (Mosaic GPU).

A block takes one run, and columns whose bits lie in one plane. Asynchronous copies bring the run's rows, the weight's
tile and the bytes that hold the columns' bits; the selected weights are written to shared memory, where the tensor core
reads them. Nothing unpacked ever reaches device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.hopper import ALIGNMENT, DEPTH, SEMANTICS, WARPGROUP_ROWS, store_rows, strip_of, tiled
from pallas_kernels.windows import Runs

LEAST_COLUMNS = 32
"""Rows of the result are copied one by one from shared memory, from multiples of 128 bytes."""


class Tiles(NamedTuple):
    """Most rows and columns of a block's product, and how many steps of its loop are under way at a time."""

    rows: int = 128
    columns: int = 128
    stages: int = 3


TILES = Tiles()


def takes(x: Any, bits: Any) -> bool:
    """Whether the kernels take operands, arrays or shapes, of this dtype and these sizes."""
    inputs, plane = bits.shape[-2:]
    return x.dtype == jnp.bfloat16 and inputs % DEPTH == 0 and plane % LEAST_COLUMNS == 0


def masked_matmul_mosaic(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    w: Float[Array, "i o"],
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: int,
    *,
    tiles: Tiles = TILES,
    interpret: Any = False,
) -> Float[Array, "t o"]:
    """See ``masked_matmul``; bf16, sizes that it ``takes``. ``interpret`` runs it on the CPU."""

    def weights(bit: Array, tile: Array) -> Array:
        return jnp.where(bit != 0, tile, jnp.zeros((), tile.dtype))

    return _launch("masked_matmul", x, y, w, bits, runs, size, layer, weights, tiles, interpret)


def sign_matmul_mosaic(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    bits: UInt8[Array, "slots layers i o8"],
    scale: Float[Array, "slots layers 1"],
    runs: Runs,
    size: int,
    layer: int,
    *,
    tiles: Tiles = TILES,
    interpret: Any = False,
) -> Float[Array, "t o"]:
    """See ``sign_matmul``; bf16, sizes that it ``takes``. ``interpret`` runs it on the CPU."""

    def weights(bit: Array) -> Array:
        return (2 * bit - 1).astype(jnp.bfloat16)

    products = _launch("sign_matmul", x, jnp.zeros_like(y), None, bits, runs, size, layer, weights, tiles, interpret)
    token = jnp.arange(len(x))[:, None]
    first = runs.starts + runs.offsets
    used = jnp.arange(len(runs.slots)) < runs.used
    own = (token >= first) & (token < first + runs.lengths) & used  # runs do not overlap
    scales = jnp.where(own, scale.at[runs.slots, layer, 0].get(mode="promise_in_bounds"), 0.0).sum(1, keepdims=True)
    return y + scales * products


def _launch(
    name: str,
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    w: Float[Array, "i o"] | None,
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: int,
    weights: Callable[..., Array],
    tiles: Tiles,
    interpret: Any,
) -> Float[Array, "t o"]:
    """``y`` with the runs' rows replaced by x V; ``weights(bits of a tile[, tile of w])`` makes V tile by tile."""
    tokens = len(y)
    rows = WARPGROUP_ROWS if min(size, tokens) <= WARPGROUP_ROWS else tiles.rows
    if missing := max(rows, -(-tokens // ALIGNMENT) * ALIGNMENT) - tokens:  # a window must not leave the batch
        x, y = (jnp.pad(each, ((0, missing), (0, 0))) for each in (x, y))
    plane = bits.shape[-1]
    columns = max(n for n in range(LEAST_COLUMNS, tiles.columns + 1, LEAST_COLUMNS) if plane % n == 0)
    block = _Block(rows, columns, plane, layer, tiles.stages, weights, bool(interpret))
    mesh = plgpu.Mesh(grid=(len(runs.slots), y.shape[1] // columns), grid_names=("run", "column"))
    kernel = pl.kernel(block.body, mesh=mesh, compiler_params=SEMANTICS, interpret=interpret, name=name)
    out = jax.new_ref(y, memory_space=plgpu.GMEM)
    operands = [x, bits] if w is None else [x, bits, w]
    kernel(runs.used[None], runs.slots, runs.starts + runs.offsets, runs.lengths, out, *operands)
    return jax.freeze(out)[:tokens]


class _Block(NamedTuple):
    """What one block of the grid does."""

    rows: int
    columns: int
    plane: int
    layer: int
    stages: int
    weights: Callable[..., Array]
    interpreted: bool

    def body(self, used: Any, slots: Any, firsts: Any, lengths: Any, y: Any, x: Any, bits: Any, *w: Any) -> None:
        run, column = jax.lax.axis_index("run"), jax.lax.axis_index("column")

        @pl.when(run < used[0])
        def _() -> None:
            slot, first, end = slots[run], firsts[run], firsts[run] + lengths[run]
            here = pl.ds(pl.multiple_of(column * self.columns, self.columns), self.columns)
            byte = pl.ds(pl.multiple_of(jax.lax.rem(column * self.columns, self.plane), self.columns), self.columns)
            sources = [bits.at[slot, self.layer, :, byte], *(each.at[:, here] for each in w)]
            bit = jax.lax.div(column * self.columns, self.plane)

            aligned = jax.lax.div(first, ALIGNMENT) * ALIGNMENT

            def tile(number: Array, carry: Array) -> Array:
                begin = aligned + number * self.rows
                own, past = jnp.maximum(begin, first), jnp.minimum(begin + self.rows, end)
                at = pl.multiple_of(jnp.minimum(begin, x.shape[0] - self.rows), ALIGNMENT)
                window = pl.ds(at, self.rows)
                products = self._products(x.at[window], sources, bit)
                store_rows(products, y.at[window, here], own - at, past - own)
                return carry

            jax.lax.fori_loop(0, pl.cdiv(end - aligned, self.rows), tile, jnp.int32(0))

    def _products(self, x: Any, sources: list[Any], bit: Array) -> Float[Array, "rows columns"]:
        def spec(shape: tuple[int, int], transforms: tuple[Any, ...], along: int) -> plgpu.BlockSpec:
            return plgpu.BlockSpec(
                shape, lambda k: (k, 0) if along == 0 else (0, k), transforms=transforms, delay_release=1
            )

        strip = strip_of(self.columns)
        transforms = tiled(2 * strip, 2)
        specs = [spec((self.rows, DEPTH), transforms, 1), spec((DEPTH, self.columns), tiled(strip, 1), 0)]
        specs += [spec((DEPTH, self.columns), transforms, 0)] * (len(sources) - 1)

        def scope(sums: Any, selected: Any) -> Array:
            def step(index: tuple[Array], x_tile: Any, bits_tile: Any, *w_tile: Any) -> None:
                own = selected.at[jax.lax.rem(index[0], 2)]
                for start in range(0, self.columns, strip):
                    part = (slice(None), pl.ds(start, strip))
                    bits_here = (self._load(bits_tile, part).astype(jnp.int32) >> bit) & 1
                    own[part] = self.weights(bits_here, *(self._load(each, part) for each in w_tile))
                plgpu.commit_smem()
                plgpu.wgmma(sums, x_tile, own)
                plgpu.wgmma_wait(1)  # the last step's operands are free, this one's are in use

            plgpu.emit_pipeline(step, grid=(x.shape[1] // DEPTH,), in_specs=specs, max_concurrent_steps=self.stages)(
                x, *sources
            )
            return sums[...]

        def selected_scope(selected: Any) -> Array:  # registers and shared memory are taken one after the other
            return pl.run_scoped(
                lambda sums: scope(sums, selected), plgpu.WGMMAAccumulatorRef((self.rows, self.columns))
            )

        return pl.run_scoped(selected_scope, plgpu.SMEM((2, DEPTH, self.columns), jnp.bfloat16, transforms=transforms))

    def _load(self, tile: Any, part: tuple[Any, ...]) -> Array:
        """A part of a tile in the tensor core's layout; the interpreter knows no layouts."""
        return tile[part] if self.interpreted else plgpu.layout_cast(tile[part], plgpu.Layout.WGMMA)
