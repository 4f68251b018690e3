"""Sorted columns in one byte each: where a column lies in its tile of 256, and where in the list each tile ends."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Integer, UInt8

TILE = 256


def tiles_of(outputs: int) -> int:
    """Tiles of a matrix with so many columns."""
    return -(-outputs // TILE)


def pack_columns(
    cols: Integer[np.ndarray, "*b n"], outputs: int
) -> tuple[UInt8[np.ndarray, "*b n"], Int32[np.ndarray, "*b tiles"]]:
    """(places in their tiles, ends of the tiles) of rising columns below ``outputs``."""
    tile = np.asarray(cols) // TILE
    ends = (tile[..., None] <= np.arange(tiles_of(outputs))).sum(-2)
    return (cols % TILE).astype(np.uint8), ends.astype(np.int32)


def unpack_columns(cols: UInt8[Array, "*b n"], ends: Int32[Array, "*b tiles"]) -> Int[Array, "*b n"]:
    """The columns; of entries behind the last end, which are padding, one past all tiles."""
    place = jnp.arange(cols.shape[-1], dtype=jnp.int32)
    behind = (place >= ends[..., at, None] for at in range(ends.shape[-1]))  # a comparison each: no pass of their own
    return cols.astype(jnp.int32) + TILE * sum(each.astype(jnp.int32) for each in behind)
