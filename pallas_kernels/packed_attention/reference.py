"""Plain XLA: gather each group into a padded view, attend, gather back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.numerics import take_rows

UNSEEN = -1e30
"""Added to scores of keys that are not seen: so large that nothing of the score is left."""


class AttentionGroup(NamedTuple):
    """Queries padded to one length. ``tokens`` [N, L] are packed positions; past ``lengths`` any of the same query's.

    What they hold there is masked out, but only finite values times zero are zero: a NaN must be the query's own.
    """

    tokens: Int[Array, "n l"] | None
    lengths: Int[Array, " n"]

    def rows(self, x: Float[Array, "t d"]) -> Float[Array, "n l d"]:
        """The group's part of ``x``, padded; without ``tokens`` the whole, whose rows are of one length already."""
        return x.reshape(len(self.lengths), -1, x.shape[1]) if self.tokens is None else take_rows(x, self.tokens)


class Prefix(NamedTuple):
    """Keys and values that rows attend to beside their own: of row n the first ``counts[n]``, the others finite."""

    key: Float[Array, "n p d"]
    value: Float[Array, "n p d"]
    counts: Int[Array, " n"]


def attend(
    q: Float[Array, "n l d"],
    k: Float[Array, "n l d"],
    v: Float[Array, "n l d"],
    lengths: Int[Array, " n"],
    heads: int,
    prefixes: Sequence[Prefix] = (),
) -> Float[Array, "n l d"]:
    """Scaled dot-product attention with keys past ``lengths`` masked out.

    The sum that softmax divides by is applied to the context, which is smaller than the scores: on a CPU their passes
    through memory are what attention costs. Keys that are not seen get a number added, which a CPU does with the pass
    that scales, a third faster than by choosing; every operand has its head's matrices in one piece, as products on a
    CPU want them.
    """
    n, length, d = q.shape
    size = d // heads
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    sources = [*prefixes, Prefix(k, v, lengths)]
    seen = jnp.concatenate([jnp.arange(s.key.shape[1]) < s.counts[:, None] for s in sources], axis=1)  # [N, P + L]
    k = jnp.concatenate([s.key.astype(q.dtype) for s in sources], axis=1)
    v = jnp.concatenate([s.value.astype(q.dtype) for s in sources], axis=1)
    q, k, v = (part.reshape(n, -1, heads, size).transpose(0, 2, 1, 3) for part in (q, k, v))
    scores = jnp.einsum("nhqd,nhdk->nhqk", q, k.mT, precision=precision, preferred_element_type=jnp.float32)
    scores = scores * size**-0.5 + jnp.where(seen, 0.0, UNSEEN)[:, None, None, :]
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    context = jnp.einsum(
        "nhqk,nhkd->nhqd", weights.astype(q.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    context /= weights.sum(-1)[..., None]
    return context.transpose(0, 2, 1, 3).reshape(n, length, d).astype(q.dtype)


def packed_attention_reference(
    q: Float[Array, "t d"],
    k: Float[Array, "t d"],
    v: Float[Array, "t d"],
    groups: tuple[AttentionGroup, ...],
    cells: Int[Array, " t"] | None,
    heads: int,
    prefixes: Sequence[Prefix] = (),
    *,
    attend: Callable[..., Float[Array, "n l d"]] = attend,
) -> Float[Array, "t d"]:
    """See ``packed_attention``; ``attend`` attends within one group."""
    d = q.shape[1]
    contexts = []
    first = 0
    for group in groups:
        last = first + len(group.lengths)
        own = [Prefix(*(part[first:last] for part in prefix)) for prefix in prefixes]
        contexts.append(attend(group.rows(q), group.rows(k), group.rows(v), group.lengths, heads, own).reshape(-1, d))
        first = last
    context = jnp.concatenate(contexts)
    return context if cells is None else take_rows(context, cells)
