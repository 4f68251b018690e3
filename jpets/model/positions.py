"""The vectors of positions."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpets.config import BackboneConfig


def position_vectors(
    table: Float[Array, "p d"], padding: Float[Array, " d"] | None, positions: Int[Array, " t"], config: BackboneConfig
) -> Float[Array, "t d"]:
    """The rows of ``table`` at ``jpets.positions.text_positions``; ``padding`` is the padding token's, in families that
    skip it."""
    places = table[positions]
    return places if padding is None else jnp.where(positions[:, None] == config.max_positions, padding, places)
