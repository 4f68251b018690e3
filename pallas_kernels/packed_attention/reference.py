"""Plain XLA: gather each group into a padded view, attend, gather back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class AttentionGroup(NamedTuple):
    """Queries padded to one length. ``tokens`` [N, L] are packed positions (past the end: padding)."""

    tokens: Int[Array, "n l"] | None
    lengths: Int[Array, " n"]


def attend(qkv: Float[Array, "n l d3"], lengths: Int[Array, " n"], heads: int) -> Float[Array, "n l d"]:
    """Scaled dot-product attention with keys past ``lengths`` masked out."""
    n, l, d3 = qkv.shape
    size = d3 // (3 * heads)
    precision = jax.lax.Precision.HIGHEST if qkv.dtype == jnp.float32 else None
    q, k, v = (part.reshape(n, l, heads, size) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
    seen = jnp.arange(l)[None, :] < lengths[:, None]  # [N, L]
    scores = jnp.where(seen[:, None, None, :], scores * size**-0.5, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores, axis=-1).astype(qkv.dtype)
    context = jnp.einsum("nhqk,nkhd->nqhd", probs, v, precision=precision, preferred_element_type=jnp.float32)
    return context.astype(qkv.dtype).reshape(n, l, heads * size)


def packed_attention_reference(
    qkv: Float[Array, "t d3"],
    groups: tuple[AttentionGroup, ...],
    cells: Int[Array, " t"] | None,
    heads: int,
) -> Float[Array, "t d"]:
    """See ``packed_attention``."""
    t, d3 = qkv.shape
    if cells is None:
        (group,) = groups
        n = group.lengths.shape[0]
        return attend(qkv.reshape(n, t // n, d3), group.lengths, heads).reshape(t, d3 // 3)
    views = []
    for tokens, lengths in groups:
        assert tokens is not None
        view = qkv.at[tokens].get(mode="fill", fill_value=0)
        views.append(attend(view, lengths, heads).reshape(-1, d3 // 3))
    return jnp.concatenate(views).at[cells].get(mode="fill", fill_value=0)
