"""Positions of tokens that are not simply counted."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def text_positions(ids: Int[np.ndarray, " t"], padding_id: int, own_position: int) -> Int[np.ndarray, " t"]:
    """Positions of a text's token ids in families that skip padding tokens: these get ``own_position``, which stands
    for the padding token's own.

    Liu et al. 2019 (fairseq, and after it Hugging Face): positions count the tokens that are not padding, whatever the
    attention mask says; so a padding token that a text spells is attended to, and takes no place.
    """
    counted = ids != padding_id
    return np.where(counted, np.cumsum(counted) - 1, own_position).astype(np.int32)
