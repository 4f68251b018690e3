"""Which devices and operands the kernel for Hopper takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_kernels.gates import Gate, hopper


def _sparse(x: Any, y: Any, *rest: Any, **settings: Any) -> bool:
    from pallas_kernels.sparse_matmul.mosaic import takes

    del x, rest, settings
    return takes(y)


def _blocks(x: Any, y: Any, rows: Any, cols: Any, ends: Any, blocks: Any, *rest: Any, **settings: Any) -> bool:
    from pallas_kernels.sparse_matmul.mosaic import takes

    del x, rows, cols, ends, rest, settings
    return takes(y, blocks.shape[-1])


SIDES = "outputs in multiples of 8, and blocks with a side that divides a strip of 32, 16 or 8 columns"
GATES: Mapping[str, Mapping[str, Gate]] = {
    "sparse_matmul": {"mosaic": hopper(_sparse, "outputs in multiples of 8")},
    "block_sparse_matmul": {"mosaic": hopper(_blocks, SIDES)},
}
"""By operator and candidate."""
