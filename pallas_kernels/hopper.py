"""What the kernels for Hopper share: tiles in shared memory that the tensor core reads, and copies of ragged rows."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WARPGROUP_ROWS = 64
"""Rows of a product that one warpgroup's instruction takes."""
DEPTH = 64
"""Numbers that a product sums up at a time."""
ALIGNMENT = 8
"""Rows of a tile in shared memory; copies into tiles begin at multiples of it."""
COMPUTING = 2
"""Warpgroups that compute; one more copies."""
COPY_REGISTERS = 40
"""Registers of each thread of the warpgroup that copies; the others share what it leaves."""
SWIZZLES = (128, 64, 32)
"""Bytes over which a tile in shared memory may be swizzled."""
SEMANTICS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def tiled(width: int, itemsize: int) -> tuple[Any, ...]:
    """Transforms of a tile that is ``width`` bytes wide."""
    return plgpu.TilingTransform((ALIGNMENT, width // itemsize)), plgpu.SwizzleTransform(width)


def strip_of(columns: int) -> int:
    """Columns of a tile of 16-bit numbers: both operands of a product have the widest swizzle that fits."""
    return next(s for s in SWIZZLES if columns * 2 % s == 0) // 2


def transposed(tile: Any, interpreted: bool) -> Any:
    """A tile for a product that reads its transpose. The interpreter cannot: its tiles are laid out so before."""
    return tile if interpreted else tile.T


def store_transposed(values: Float[Array, "columns rows"], staged: Any, y: Any, interpreted: bool) -> None:
    """``y``, [rows, columns] in device memory, by way of ``staged`` in shared memory, which has its shape."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before
    if interpreted:
        staged[...] = values.T
    else:
        staged.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, y)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_rows(
    values: Float[Array, "rows columns"], y: Any, skipped: Int[Array, ""] | int, count: Int[Array, ""]
) -> None:
    """The ``count`` rows after those ``skipped``: copies have fixed sizes, so one for each bit of the count."""
    rows, columns = values.shape

    def scope(staged: Any) -> None:
        staged[...] = values
        plgpu.commit_smem()
        done = skipped
        for power in range(int(math.log2(rows)), -1, -1):
            part, own = count & (1 << power), pl.ds(done, 1 << power)
            pl.when(part != 0)(functools.partial(plgpu.copy_smem_to_gmem, staged.at[own], y.at[own]))
            done = done + part
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(scope, plgpu.SMEM((rows, columns), jnp.float32))
