"""Self-attention over packed tokens."""

from pallas_kernels.packed_attention.api import CANDIDATES, AttentionGroup, Prefix, packed_attention

__all__ = ["CANDIDATES", "AttentionGroup", "Prefix", "packed_attention"]
