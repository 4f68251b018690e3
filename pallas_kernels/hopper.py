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
SWIZZLES = (128, 64, 32)
"""Bytes over which a tile in shared memory may be swizzled."""
SEMANTICS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def tiled(width: int, itemsize: int) -> tuple[Any, ...]:
    """Transforms of a tile that is ``width`` bytes wide."""
    return plgpu.TilingTransform((ALIGNMENT, width // itemsize)), plgpu.SwizzleTransform(width)


def strip_of(columns: int) -> int:
    """Columns of a tile of 16-bit numbers: both operands of a product have the widest swizzle that fits."""
    return next(s for s in SWIZZLES if columns * 2 % s == 0) // 2


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
