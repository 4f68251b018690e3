"""Hopper: one launch for all runs; bits meet the weight in shared memory, next to the tensor core (Mosaic GPU).

The product is computed transposed: weights are its left operand, whose rows the tensor core takes 64 at a time, tokens
its right one, in steps of 8, so a run of few tokens wastes little. A block takes one run and 32 bytes of a row of bits,
which are 256 columns, 32 of each plane: every bit is read once. One warpgroup copies; two others select weights, half
of the planes each, write them to shared memory, and multiply. Nothing unpacked ever reaches device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.hopper import (
    ALIGNMENT,
    COMPUTING,
    COPY_REGISTERS,
    DEPTH,
    SEMANTICS,
    WARPGROUP_ROWS,
    store_transposed,
    tiled,
    transposed,
)
from pallas_kernels.masked_matmul.batched import masked_matmul_batched, sign_matmul_batched
from pallas_kernels.windows import Runs, take_runs

PLANES = 8
SHARED_BYTES = 227 << 10
"""Shared memory that a block of the grid can have (Hopper)."""
BYTES = 32
"""Bytes of a row of bits that a block takes: their columns fill a row of 64 bytes, which the tensor core can read."""
OWN_PLANES = PLANES // COMPUTING
"""Planes of a computing warpgroup."""
PARTS = OWN_PLANES * BYTES // WARPGROUP_ROWS
"""Parts of its columns that one instruction takes."""

NARROW = tiled(2 * BYTES, 2)
"""Of all 16-bit tiles: both operands of a product must be swizzled alike."""


class Tiles(NamedTuple):
    """Most tokens of a block's product, and how many steps of its loop are under way at a time."""

    tokens: int = 128
    stages: int = 3


TILES = Tiles()


def takes(x: Any, bits: Any) -> bool:
    """Whether the kernels take operands, arrays or shapes, of this dtype and these sizes."""
    inputs, plane = bits.shape[-2:]
    return x.dtype == jnp.bfloat16 and min(x.shape) > 0 and inputs % DEPTH == 0 and plane % BYTES == 0


def masked_matmul_mosaic(
    x: Float[Array, "t i"],
    w: Float[Array, "i o"],
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: int,
    *,
    tiles: Tiles = TILES,
    interpret: Any = False,
) -> Float[Array, "k s o"]:
    """x (W . M_task) for each run's tokens; the batched form where the kernel does not take them. ``interpret`` runs it
    on the CPU."""
    if not takes(x, bits):
        return masked_matmul_batched(x, w, bits, runs, size, layer)

    def weights(bit: Array, tile: Array) -> Array:
        return jnp.where(bit != 0, tile, jnp.zeros((), tile.dtype))

    planes = w.reshape(len(w), PLANES, -1).swapaxes(0, 1)  # a copy of W: 1 % of what all runs read of it
    return _launch("masked_matmul", x, planes, bits, runs, size, layer, weights, tiles, interpret)


def sign_matmul_mosaic(
    x: Float[Array, "t i"],
    bits: UInt8[Array, "slots layers i o8"],
    scale: Float[Array, "slots layers 1"],
    runs: Runs,
    size: int,
    layer: int,
    *,
    tiles: Tiles = TILES,
    interpret: Any = False,
) -> Float[Array, "k s o"]:
    """s (x sign(D_task)) for each run's tokens; the batched form where the kernel does not take them. ``interpret``
    runs it on the CPU."""
    if not takes(x, bits):
        return sign_matmul_batched(x, bits, scale, runs, size, layer)

    def weights(bit: Array) -> Array:
        return (2 * bit - 1).astype(jnp.bfloat16)

    products = _launch("sign_matmul", x, None, bits, runs, size, layer, weights, tiles, interpret)
    return scale.at[runs.slots, layer].get(mode="promise_in_bounds")[:, None] * products


def _launch(
    name: str,
    x: Float[Array, "t i"],
    w: Float[Array, "8 i o8"] | None,
    bits: UInt8[Array, "slots layers i o8"],
    runs: Runs,
    size: int,
    layer: int,
    weights: Callable[..., Array],
    tiles: Tiles,
    interpret: Any,
) -> Float[Array, "k s o"]:
    """x V of each run's tokens; ``weights(bits of a tile[, tile of w])`` makes V tile by tile."""
    capacity, plane = len(runs.slots), bits.shape[-1]
    tokens = min(tiles.tokens, -(-size // ALIGNMENT) * ALIGNMENT)
    length = -(-size // tokens) * tokens
    rows = take_runs(x, runs, length)
    if interpret:
        rows = rows.swapaxes(1, 2)
    block = _Block(tokens, min(tiles.stages, _most_stages(tokens)), weights, bool(interpret))
    kernel = pl.kernel(
        block.body,
        out_type=jax.ShapeDtypeStruct(
            (capacity, length, plane // BYTES, COMPUTING * PARTS, WARPGROUP_ROWS), jnp.float32
        ),
        mesh=plgpu.Mesh(
            grid=(capacity, length // tokens, plane // BYTES),
            grid_names=("run", "tile", "byte"),
            num_threads=COMPUTING + 1,
            thread_name="warpgroup",
        ),
        compiler_params=SEMANTICS,
        interpret=interpret,
        name=name,
    )
    place = jnp.full(1, layer, jnp.int32)  # an operand: one kernel for all layers is compiled once
    found = kernel(runs.used[None], runs.slots, runs.lengths, place, rows, bits, *(() if w is None else (w,)))
    # From blocks of all planes to planes: pieces of 128 bytes, gathered where the tokens gather their rows.
    natural = found.reshape(capacity, length, plane // BYTES, PLANES, BYTES).swapaxes(2, 3)
    return natural.reshape(capacity, length, PLANES * plane)[:, :size]


def _most_stages(tokens: int) -> int:
    """The steps of a block's loop that a multiprocessor's shared memory holds beside its results, with a shared
    weight."""
    held = COMPUTING * (2 * DEPTH * OWN_PLANES * BYTES + 4 * tokens * WARPGROUP_ROWS)
    step = DEPTH * (2 * tokens + BYTES + 2 * PLANES * BYTES)
    return max(1, (SHARED_BYTES - held) // step)


class _Block(NamedTuple):
    """What one block of the grid does."""

    tokens: int
    stages: int
    weights: Callable[..., Array]
    interpreted: bool

    def body(self, used: Any, slots: Any, lengths: Any, layer: Any, x: Any, bits: Any, *rest: Any) -> None:
        """``rest``: the shared weight if there is one, and the result."""
        *w, y = rest
        run, tile, byte = (jax.lax.axis_index(name) for name in ("run", "tile", "byte"))

        @pl.when((run < used[0]) & (tile * self.tokens < lengths[run]))
        def _() -> None:
            here = pl.ds(pl.multiple_of(byte * BYTES, BYTES), BYTES)
            window = pl.ds(pl.multiple_of(tile * self.tokens, ALIGNMENT), self.tokens)
            rows = x.at[run, :, window] if self.interpreted else x.at[run, window]
            sources = [rows, bits.at[slots[run], layer[0], :, here], *(each.at[:, :, here] for each in w)]

            def scope(selected: Any, staged: Any) -> None:
                self._pipeline(bits.shape[2] // DEPTH, len(w), y.at[run, window, byte], selected, staged)(*sources)

            pl.run_scoped(
                scope,
                plgpu.SMEM(
                    (COMPUTING, *self._of_product(DEPTH, OWN_PLANES * BYTES)), jnp.bfloat16, transforms=self._narrow
                ),
                plgpu.SMEM((COMPUTING, self.tokens, WARPGROUP_ROWS), jnp.float32, transforms=tiled(128, 4)),
                collective_axes="warpgroup",
            )

    def _pipeline(self, steps: int, shared: int, y: Any, selected: Any, staged: Any) -> Callable[..., Any]:
        specs = [
            plgpu.BlockSpec(
                self._of_product(self.tokens, DEPTH), lambda k: self._of_product(0, k), transforms=self._narrow
            ),
            plgpu.BlockSpec((DEPTH, BYTES), lambda k: (k, 0), transforms=tiled(BYTES, 1)),
            *[plgpu.BlockSpec((PLANES, DEPTH, BYTES), lambda k: (0, k, 0), transforms=NARROW)] * shared,
        ]

        def computing(run_pipeline: Callable[[Any], Any]) -> None:
            group = jax.lax.axis_index("warpgroup")

            def scope(sums: Any) -> Array:
                run_pipeline(sums)
                return sums[...]

            shape = (OWN_PLANES * BYTES, self.tokens)
            total = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(shape))
            for part in range(PARTS):
                rows = slice(part * WARPGROUP_ROWS, (part + 1) * WARPGROUP_ROWS)
                store_transposed(total[rows], staged.at[group], y.at[:, group * PARTS + part], self.interpreted)

        def step(index: tuple[Array], x_tile: Any, bits_tile: Any, *rest: Any) -> Any:
            del index
            *w_tile, sums = rest
            group = jax.lax.axis_index("warpgroup")
            own, bytes_ = selected.at[group], self._load(bits_tile).astype(jnp.int32)
            for number in range(OWN_PLANES):
                plane = group * OWN_PLANES + number
                values = [self._load(each.at[plane]) for each in w_tile]
                here, found = pl.ds(number * BYTES, BYTES), self.weights((bytes_ >> plane) & 1, *values)
                if self.interpreted:
                    own[here] = found.T
                else:
                    own[:, here] = found
            plgpu.commit_smem()
            plgpu.wgmma(sums, transposed(own, self.interpreted), transposed(x_tile, self.interpreted))
            plgpu.wgmma_wait(0)  # the selected weights are written anew in the next step
            return sums

        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=specs,
            memory_registers=COPY_REGISTERS,
            max_concurrent_steps=self.stages,
            wg_axis="warpgroup",
            num_compute_wgs=COMPUTING,
            compute_context=computing,
        )

    @property
    def _narrow(self) -> tuple[Any, ...]:
        return () if self.interpreted else NARROW

    def _of_product(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape or place of a tile whose transpose a product reads."""
        return (columns, rows) if self.interpreted else (rows, columns)

    def _load(self, tile: Any) -> Array:
        """A tile in the tensor core's layout; the interpreter knows no layouts."""
        return tile[...] if self.interpreted else plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
