"""x D for rows whose task adds a sparse difference to the shared weight."""

from pallas_kernels.sparse_matmul.api import sparse_matmul

__all__ = ["sparse_matmul"]
