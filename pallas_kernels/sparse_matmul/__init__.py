"""x D for rows whose task adds a sparse difference to the shared weight: single non-zeros, or whole blocks."""

from pallas_kernels.sparse_matmul.api import (
    BLOCKS,
    SPARSE,
    block_sparse_matmul,
    pack_columns,
    sparse_matmul,
    tiles_of,
)
from pallas_kernels.sparse_matmul.gates import GATES

__all__ = ["BLOCKS", "GATES", "SPARSE", "block_sparse_matmul", "pack_columns", "sparse_matmul", "tiles_of"]
