"""Positions of tokens that are not simply counted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpets.config import BackboneConfig


def position_vectors(
    table: Float[Array, "p d"], padding: Float[Array, " d"] | None, positions: Int[Array, " t"], config: BackboneConfig
) -> Float[Array, "t d"]:
    """The rows of ``table`` at ``text_positions``; ``padding`` is the padding token's, in families that skip it."""
    places = table[positions]
    return places if padding is None else jnp.where(positions[:, None] == config.max_positions, padding, places)


def text_positions(ids: Any, config: BackboneConfig, xp: ModuleType) -> Any:
    """Positions [..., tokens] of texts' token ids. Where the family skips padding tokens, these get ``max_positions``,
    which stands for the padding token's own position. ``xp`` is ``numpy`` or ``jax.numpy``.

    Liu et al. 2019 (fairseq, and after it Hugging Face): positions count the tokens that are not padding, whatever the
    attention mask says; so a padding token that a text spells is attended to, and takes no place.
    """
    counted = ids != config.padding_id
    return xp.where(counted, xp.cumsum(counted, -1) - 1, config.max_positions).astype(xp.int32)
