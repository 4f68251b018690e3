"""Positions of tokens that are not simply counted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jpets.config import BackboneConfig


def text_positions(ids: Any, config: BackboneConfig, xp: ModuleType) -> Any:
    """Positions [..., tokens] of texts' token ids. Where the family skips padding tokens, these get ``max_positions``,
    which stands for the padding token's own position. ``xp`` is ``numpy`` or ``jax.numpy``.

    Liu et al. 2019 (fairseq, and after it Hugging Face): positions count the tokens that are not padding, whatever the
    attention mask says; so a padding token that a text spells is attended to, and takes no place.
    """
    counted = ids != config.padding_id
    return xp.where(counted, xp.cumsum(counted, -1) - 1, config.max_positions).astype(xp.int32)
