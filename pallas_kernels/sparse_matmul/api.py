"""``sparse_matmul``: for each run k of tokens, ``y[run] += x[run] @ D[slot[k], layer]``, D in column-sorted COO;
``block_sparse_matmul``: the same with square blocks in the places of single non-zeros.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Num, UInt16

from pallas_kernels.sparse_matmul.reference import block_sparse_matmul_reference, sparse_matmul_reference
from pallas_kernels.windows import Runs


def sparse_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt16[Array, "slots layers n"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: int,
) -> Float[Array, "t o"]:
    """``y`` with x D_task added on the runs' rows (Diff-pruning, PetS section 3.1), f32 [t, o].

    Non-zeros are sorted by column; unused entries hold column o or above and are dropped. On a CPU additions run in the
    order of the entries, so equal inputs give equal bits.
    """
    return sparse_matmul_reference(x, y, rows, cols, values, runs, size, layer)


def block_sparse_matmul(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt16[Array, "slots layers n"],
    blocks: Num[Array, "slots layers n b b"],
    runs: Runs,
    size: int,
    layer: int,
) -> Float[Array, "t o"]:
    """``y`` with x D_task added on the runs' rows, D in blocks of b x b (structured Diff-pruning), f32 [t, o].

    ``rows`` and ``cols`` count blocks, sorted by column; unused ones hold column o / b or above and are dropped. Both i
    and o are multiples of b. On a CPU blocks are added in their order, so equal inputs give equal bits.
    """
    return block_sparse_matmul_reference(x, y, rows, cols, blocks, runs, size, layer)
