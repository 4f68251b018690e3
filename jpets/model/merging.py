"""Merging: the vector of a token from those of the n-grams around it (HMI section 3.3.1, equation 2; SkipBERT)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jpets.config import SCALED, TableFormat
from jpets.model.batch import PackedBatch
from pallas_kernels.numerics import AnyArray


def merged(
    table: Shaped[Array, "r p e"],
    rows: Int[AnyArray, " t"],
    text_of_token: Int[Array, " t"],
    places: Sequence[int],
    before: int,
    kept_as: TableFormat = "bfloat16",
) -> Float[Array, "t d"]:
    """Each token's vectors summed over the n-grams that contain it, those of the tokens around it in its text, f32.

    ``rows`` are the rows of the tokens' n-grams in ``table``, -1 for a token that has none; the token of an n-gram has
    ``before`` tokens before it, and the vectors of ``table``, stored as ``kept_as`` says, are those of ``places`` of an
    n-gram.
    """
    count, total = len(rows), jnp.zeros((), jnp.float32)
    for at, place in enumerate(places):
        of = jnp.arange(count) - (place - before)  # the token whose n-gram has this one at ``place``
        near = jnp.clip(of, 0, count - 1)
        row = rows[near]
        inside = (of == near) & (text_of_token[near] == text_of_token) & (row >= 0)
        total += jnp.where(inside[:, None], numbers(table[jnp.maximum(row, 0), at], kept_as), 0.0)
    return total


def numbers(kept: Shaped[Array, "t e"], kept_as: TableFormat) -> Float[Array, "t d"]:
    """Stored vectors as f32. In 8 bits a vector's scales, biased exponents of two, stand behind its numbers (MXFP8)."""
    if kept_as == "bfloat16":
        return kept.astype(jnp.float32)
    width = kept.shape[-1] * SCALED // (SCALED + 1)
    codes = jax.lax.bitcast_convert_type(kept[:, :width], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = jax.lax.bitcast_convert_type(kept[:, width:].astype(jnp.uint32) << 23, jnp.float32)
    return (codes.reshape(len(kept), -1, SCALED) * scales[..., None]).reshape(len(kept), width)


def texts_of_tokens(batch: PackedBatch) -> Int[Array, " t"]:
    """The number of each token's row in a batch; tokens without one have any."""
    if batch.row_of_token is not None:
        return batch.row_of_token
    count = len(batch.positions)
    return jnp.arange(count) // (count // batch.row_count)
