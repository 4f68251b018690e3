"""Self-attention over packed tokens."""

from pallas_kernels.packed_attention.api import CANDIDATES, AttentionGroup, Prefix, packed_attention
from pallas_kernels.packed_attention.gates import GATES

__all__ = ["CANDIDATES", "GATES", "AttentionGroup", "Prefix", "packed_attention"]
