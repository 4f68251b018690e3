"""``sparse_matmul``: for each run k of tokens, ``y[run] += x[run] @ D[slot[k], layer]``, D in column-sorted COO;
``block_sparse_matmul``: the same with square blocks in the places of single non-zeros.

A non-zero takes five bytes beside bf16 values: its row, and its column as ``pack_columns`` has them.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int32, Num, UInt8, UInt16

from pallas_kernels.sparse_matmul.columns import pack_columns, tiles_of
from pallas_kernels.sparse_matmul.reference import block_sparse_matmul_reference, sparse_matmul_reference
from pallas_kernels.windows import Runs

__all__ = ["block_sparse_matmul", "pack_columns", "sparse_matmul", "tiles_of"]


def sparse_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: int,
) -> Float[Array, "t o"]:
    """``y`` with x D_task added on the runs' rows (Diff-pruning, PetS section 3.1), f32 [t, o].

    Non-zeros are sorted by column; entries behind the last end are dropped. On a CPU additions run in the order of the
    entries, so equal inputs give equal bits.
    """
    return sparse_matmul_reference(x, y, rows, cols, ends, values, runs, size, layer)


def block_sparse_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt8[Array, "slots layers n"],
    ends: Int32[Array, "slots layers tiles"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: int,
) -> Float[Array, "t o"]:
    """``y`` with x D_task added on the runs' rows, D in blocks of b x b (structured Diff-pruning), f32 [t, o].

    ``rows`` and ``cols`` count blocks, sorted by column; those behind the last end are dropped. Both i and o are
    multiples of b. On a CPU blocks are added in their order, so equal inputs give equal bits.
    """
    return block_sparse_matmul_reference(x, y, rows, cols, ends, blocks, runs, size, layer)
