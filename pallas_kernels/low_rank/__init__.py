"""Grouped shrink and expand: the product of LoRA and of adapters, every row with its own task's two thin matrices."""

from pallas_kernels.low_rank.api import CANDIDATES, low_rank

__all__ = ["CANDIDATES", "low_rank"]
