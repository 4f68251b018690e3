"""Hopper: shrink and expand in one launch; what lies between them never leaves the chip (Mosaic GPU).

A block takes rows of one group. Asynchronous copies bring the rows and the task's matrices straight from the banks: no
copy of them is gathered in device memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt16

from pallas_kernels.hopper import ALIGNMENT, DEPTH, SEMANTICS, WARPGROUP_ROWS, store_rows, strip_of, tiled
from pallas_kernels.numerics import ACTIVATIONS, take_slots

RANK_STEP = 16
"""Numbers that one of the tensor core's instructions sums up. Matrices of other ranks are gathered and filled up with
zeros, which is little for the small ranks that LoRA has."""
COLUMNS = (128, 64, 32)
"""Columns of the result that a block may take at a time."""
MOST_RANK = 128
"""What a block of 128 rows keeps in shared memory is then 224 KiB, of 227."""


class Tiles(NamedTuple):
    """Most rows of a block, and how many steps of its loops are under way at a time."""

    rows: int = 128
    stages: int = 3


TILES = Tiles()


def _gelu(x: Float[Array, "rows r"]) -> Float[Array, "rows r"]:
    """x Phi(x) to 2e-7 (Abramowitz and Stegun 1964, 7.1.26): Mosaic lays out neither erf nor erfc."""
    size = jnp.maximum(x, -x) * 0.5**0.5
    t = 1 / (1 + 0.3275911 * size)
    terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    tail = 0.5 * functools.reduce(lambda total, term: (total + term) * t, terms, 0.0) * jnp.exp(-size * size)
    return x * jnp.where(x < 0, tail, 1 - tail)


ON_CHIP: Mapping[str, Callable[[Array], Array]] = {
    **ACTIVATIONS,
    "gelu": _gelu,
    "relu": lambda x: jnp.maximum(x, 0),
}
"""Activations without erfc and custom derivatives, which Mosaic lacks."""


def takes(x: Any, down: Any, up: Any) -> bool:
    """Whether the kernel takes operands, arrays or shapes, of these dtypes and sizes."""
    inputs, rank = down.shape[-2:]
    sizes = inputs % DEPTH == 0 and rank <= MOST_RANK and up.shape[-1] % COLUMNS[-1] == 0
    return x.dtype == jnp.bfloat16 and down.dtype == up.dtype == jnp.uint16 and min(x.shape) > 0 and sizes


def low_rank_mosaic(
    x: Float[Array, "g s i"],
    down: UInt16[Array, "slots layers i r"],
    up: UInt16[Array, "slots layers r o"],
    slots: Int[Array, " g"],
    layer: int,
    *,
    activation: str = "identity",
    down_bias: Num[Array, "slots layers r"] | None = None,
    up_bias: Num[Array, "slots layers o"] | None = None,
    tiles: Tiles = TILES,
    interpret: Any = False,
) -> Float[Array, "g s o"]:
    """See ``low_rank``; bf16, sizes that it ``takes``. ``interpret`` runs it on the CPU."""
    groups, length, inputs = x.shape
    rank, outputs = up.shape[-2:]
    missing = -rank % RANK_STEP
    stride = -(-length // ALIGNMENT) * ALIGNMENT
    rows = WARPGROUP_ROWS if stride <= WARPGROUP_ROWS else tiles.rows
    x = jnp.pad(x, ((0, 0), (0, stride - length), (0, 0))).reshape(groups * stride, inputs)
    x = jnp.pad(x, ((0, max(0, rows - len(x))), (0, 0)))  # a window must not leave the batch

    def biases(bank: Array | None, size: int) -> Float[Array, "g size"]:
        own = jnp.zeros((groups, size)) if bank is None else take_slots(bank, slots, layer).astype(jnp.float32)
        return jnp.pad(own, ((0, 0), (0, size - own.shape[1])))

    first_bias, last_bias = biases(down_bias, rank + missing), biases(up_bias, outputs)
    if missing:
        own = (bank.at[slots, layer].get(mode="promise_in_bounds")[:, None] for bank in (down, up))
        down, up = (jnp.pad(each, fill) for each, fill in zip(own, _fills(missing), strict=True))
        slots, layer = jnp.arange(groups, dtype=slots.dtype), 0
    columns = next(n for n in COLUMNS if outputs % n == 0)
    block = _Block(rows, columns, stride, tiles.stages, activation, bool(interpret))
    kernel = pl.kernel(
        block.body,
        out_type=jax.ShapeDtypeStruct((len(x), outputs), jnp.float32),
        mesh=plgpu.Mesh(grid=(groups, -(-stride // rows)), grid_names=("group", "tile")),
        compiler_params=SEMANTICS,
        interpret=interpret,
        name="low_rank",
    )
    place = jnp.full(1, layer, jnp.int32)  # an operand: one kernel for all layers is compiled once
    found = kernel(slots, place, x, down, first_bias, up, last_bias)
    return found[: groups * stride].reshape(groups, stride, outputs)[:, :length]


def _fills(missing: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """The widths that add so many columns to a bank of first matrices, and rows to one of second matrices."""
    none, more = (0, 0), (0, missing)
    return (none, none, none, more), (none, none, more, none)


class _Block(NamedTuple):
    """What one block of the grid does."""

    rows: int
    columns: int
    stride: int
    stages: int
    activation: str
    interpreted: bool

    def body(self, slots: Any, layer: Any, x: Any, down: Any, down_bias: Any, up: Any, up_bias: Any, y: Any) -> None:
        group, tile = jax.lax.axis_index("group"), jax.lax.axis_index("tile")
        begin, past = group * self.stride + tile * self.rows, (group + 1) * self.stride
        at = pl.multiple_of(jnp.minimum(begin, x.shape[0] - self.rows), ALIGNMENT)
        window, slot = pl.ds(at, self.rows), slots[group]
        hidden = self._shrink(x.at[window], down.at[slot, layer[0]])
        hidden = ON_CHIP[self.activation](hidden + self._rows_of(down_bias.at[group], hidden.shape[1]))
        count = jnp.minimum(begin + self.rows, past) - begin
        self._expand(hidden, up.at[slot, layer[0]], up_bias.at[group], y.at[window], begin - at, count)

    def _shrink(self, x: Any, down: Any) -> Float[Array, "rows r"]:
        rank = down.shape[1]
        transforms = tiled(2 * strip_of(rank), 2)
        specs = [
            plgpu.BlockSpec((self.rows, DEPTH), lambda k: (0, k), transforms=transforms, delay_release=1),
            plgpu.BlockSpec((DEPTH, rank), lambda k: (k, 0), transforms=transforms, delay_release=1),
        ]

        def scope(sums: Any, weights: Any) -> Array:
            def step(index: tuple[Array], x_tile: Any, bits: Any) -> None:
                own = weights.at[jax.lax.rem(index[0], 2)]
                self._reinterpret(bits, own, strip_of(rank))
                plgpu.wgmma(sums, x_tile, own)
                plgpu.wgmma_wait(1)  # the last step's operands are free, this one's are in use

            plgpu.emit_pipeline(step, grid=(x.shape[1] // DEPTH,), in_specs=specs, max_concurrent_steps=self.stages)(
                x, down
            )
            return sums[...]

        return pl.run_scoped(
            lambda weights: pl.run_scoped(  # registers and shared memory are taken one after the other
                lambda sums: scope(sums, weights), plgpu.WGMMAAccumulatorRef((self.rows, rank))
            ),
            plgpu.SMEM((2, DEPTH, rank), jnp.bfloat16, transforms=transforms),
        )

    def _expand(
        self, hidden: Float[Array, "rows r"], up: Any, up_bias: Any, y: Any, skipped: Array, count: Array
    ) -> None:
        rank = up.shape[0]
        strip = min(strip_of(rank), strip_of(self.columns))
        transforms = tiled(2 * strip, 2)

        def scope(staged: Any, weights: Any) -> None:
            staged[...] = hidden.astype(jnp.bfloat16)
            plgpu.commit_smem()

            def step(index: tuple[Array], bits: Any) -> None:
                self._reinterpret(bits, weights, strip)

                def product(sums: Any) -> Array:
                    plgpu.wgmma(sums, staged, weights)
                    plgpu.wgmma_wait(0)
                    return sums[...]

                values = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((self.rows, self.columns)))
                here = pl.ds(pl.multiple_of(index[0] * self.columns, self.columns), self.columns)
                values = values + self._rows_of(up_bias.at[here], self.columns)
                store_rows(values, y.at[:, here], skipped, count)

            spec = plgpu.BlockSpec((rank, self.columns), lambda k: (0, k), transforms=transforms)
            plgpu.emit_pipeline(
                step, grid=(y.shape[1] // self.columns,), in_specs=[spec], max_concurrent_steps=self.stages
            )(up)

        operands = (hidden.shape, (rank, self.columns))
        pl.run_scoped(scope, *(plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms) for shape in operands))

    def _reinterpret(self, bits: Any, weights: Any, strip: int) -> None:
        """Banks keep bf16 as uint16: the tensor core's operand is written anew."""
        values = bits[...]
        if not self.interpreted:  # the interpreter knows no layouts
            layout = plgpu.Layout.SMEM_GMEM_COPY(bits.shape, jnp.uint16, 2 * strip)
            values = plgpu.layout_cast(values, layout)
        weights[...] = jax.lax.bitcast_convert_type(values, jnp.bfloat16)
        plgpu.commit_smem()

    def _rows_of(self, bias: Any, size: int) -> Float[Array, "rows size"]:
        """The same numbers for each row."""
        if self.interpreted:
            return jnp.broadcast_to(bias[...], (self.rows, size))
        given: dict[str, Any] = {"idx": ()} if jax.__version_info__ < (0, 11) else {}  # then it wants none
        own = plgpu.load(bias, **given, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return jax.lax.broadcast_in_dim(own, (self.rows, size), (1,))
