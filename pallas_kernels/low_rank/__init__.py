"""Grouped shrink and expand: the product of LoRA and of adapters, every row with its own task's two thin matrices."""

from pallas_kernels.low_rank.api import CANDIDATES, low_rank
from pallas_kernels.low_rank.gates import GATES

__all__ = ["CANDIDATES", "GATES", "low_rank"]
