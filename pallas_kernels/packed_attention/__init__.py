"""Self-attention over packed tokens."""

from pallas_kernels.packed_attention.api import AttentionGroup, packed_attention

__all__ = ["AttentionGroup", "packed_attention"]
