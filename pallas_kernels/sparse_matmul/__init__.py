"""x D for rows whose task adds a sparse difference to the shared weight: single non-zeros, or whole blocks."""

from pallas_kernels.sparse_matmul.api import block_sparse_matmul, sparse_matmul

__all__ = ["block_sparse_matmul", "sparse_matmul"]
