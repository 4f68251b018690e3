"""Positions of tokens that are not simply counted."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def text_positions(ids: Any, padding_id: int, own_position: int, xp: ModuleType) -> Any:
    """Positions [..., tokens] of texts' token ids in families that skip padding tokens: these get ``own_position``,
    which stands for the padding token's own. ``xp`` is ``numpy`` or ``jax.numpy``.

    Liu et al. 2019 (fairseq, and after it Hugging Face): positions count the tokens that are not padding, whatever the
    attention mask says; so a padding token that a text spells is attended to, and takes no place.
    """
    counted = ids != padding_id
    return xp.where(counted, xp.cumsum(counted, -1) - 1, own_position).astype(xp.int32)
