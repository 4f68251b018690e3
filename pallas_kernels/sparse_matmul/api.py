"""``sparse_matmul``: for each run k of tokens, ``y[run] += x[run] @ D[slot[k], layer]``, D in column-sorted COO;
``block_sparse_matmul``: the same with square blocks in the places of single non-zeros.

A non-zero takes five bytes beside bf16 values: its row, and its column as ``pack_columns`` has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float, Int32, Num, UInt8, UInt16

from pallas_kernels.numerics import LayerIndex
from pallas_kernels.sparse_matmul.columns import pack_columns, tiles_of
from pallas_kernels.sparse_matmul.dense import block_sparse_matmul_dense, sparse_matmul_dense
from pallas_kernels.sparse_matmul.reference import block_sparse_matmul_reference, sparse_matmul_reference
from pallas_kernels.windows import REFERENCE, Runs, combine_runs

__all__ = ["BLOCKS", "SPARSE", "block_sparse_matmul", "pack_columns", "sparse_matmul", "tiles_of"]


def _sparse_mosaic(*operands: Any, **settings: Any) -> Array:
    from pallas_kernels.sparse_matmul.mosaic import sparse_matmul_mosaic  # a quarter of a second, for GPUs alone

    return sparse_matmul_mosaic(*operands, **settings)


def _block_mosaic(*operands: Any, **settings: Any) -> Array:
    from pallas_kernels.sparse_matmul.mosaic import block_sparse_matmul_mosaic

    return block_sparse_matmul_mosaic(*operands, **settings)


SPARSE: Mapping[str, Callable[..., Array]] = {"dense": sparse_matmul_dense, "mosaic": _sparse_mosaic}
"""The candidates without a loop, by name: of (x, rows, cols, ends, values, runs, size, layer, outputs) each returns the
runs' products [k, s, outputs]. As ``masked_matmul``'s they take all operands."""
BLOCKS: Mapping[str, Callable[..., Array]] = {"dense": block_sparse_matmul_dense, "mosaic": _block_mosaic}
"""The same with blocks for values."""


def sparse_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
    candidate: str = REFERENCE,
) -> Float[Array, "t o"]:
    """``y`` with x D_task added on the runs' rows (Diff-pruning, PetS section 3.1), f32 [t, o].

    Non-zeros are sorted by column, then row, without repeats; entries behind the last end are dropped. The reference
    adds in the order of the entries on a CPU, so equal inputs give equal bits.
    """
    if candidate == REFERENCE:
        return sparse_matmul_reference(x, y, rows, cols, ends, values, runs, size, layer)
    found = SPARSE[candidate](x, rows, cols, ends, values, runs, size, layer, y.shape[1])
    return combine_runs(y, operator.add, found, runs)


def block_sparse_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: LayerIndex,
    candidate: str = REFERENCE,
) -> Float[Array, "t o"]:
    """``y`` with x D_task added on the runs' rows, D in blocks of b x b (structured Diff-pruning), f32 [t, o].

    ``rows`` and ``cols`` count blocks, sorted by column, then row, without repeats; those behind the last end are
    dropped. Both i and o are multiples of b. The reference adds blocks in their order on a CPU, so equal inputs give
    equal bits.
    """
    if candidate == REFERENCE:
        return block_sparse_matmul_reference(x, y, rows, cols, ends, blocks, runs, size, layer)
    found = BLOCKS[candidate](x, rows, cols, ends, blocks, runs, size, layer, y.shape[1])
    return combine_runs(y, operator.add, found, runs)
