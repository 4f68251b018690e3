"""Self-attention over packed tokens."""

from pallas_kernels.packed_attention.api import AttentionGroup, Prefix, packed_attention

__all__ = ["AttentionGroup", "Prefix", "packed_attention"]
