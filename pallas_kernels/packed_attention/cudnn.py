"""cuDNN's fused attention for each group of queries: scores never reach device memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.packed_attention.reference import AttentionGroup, Prefix, attend, packed_attention_reference

LARGEST_HEAD = 128
"""Numbers of a head that cuDNN takes before Hopper."""


def packed_attention_cudnn(
    q: Float[Array, "t d"],
    k: Float[Array, "t d"],
    v: Float[Array, "t d"],
    groups: tuple[AttentionGroup, ...],
    cells: Int[Array, " t"] | None,
    heads: int,
    prefixes: Sequence[Prefix] = (),
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "t d"]:
    """See ``packed_attention``. The reference attends where rows have prefixes, and to numbers or heads that cuDNN does
    not take.

    ``implementation`` "xla" computes the same on any device, and takes them.
    """
    own = functools.partial(_attend, implementation=implementation)
    return packed_attention_reference(q, k, v, groups, cells, heads, prefixes, attend=own)


def takes(q: Float[Array, "n l d"], heads: int) -> bool:
    """Whether cuDNN takes numbers and heads like these on every device that it has attention for."""
    size = q.shape[-1] // heads
    return q.dtype.itemsize == 2 and size % 8 == 0 and size <= LARGEST_HEAD


def _attend(
    q: Float[Array, "n l d"],
    k: Float[Array, "n l d"],
    v: Float[Array, "n l d"],
    lengths: Int[Array, " n"],
    heads: int,
    prefixes: Sequence[Prefix],
    *,
    implementation: Literal["cudnn", "xla"],
) -> Float[Array, "n l d"]:
    if prefixes or not (implementation == "xla" or takes(q, heads)):
        return attend(q, k, v, lengths, heads, prefixes)
    n, length, d = q.shape
    split = (part.reshape(n, length, heads, d // heads) for part in (q, k, v))
    least = jnp.maximum(lengths, 1)  # a row of no query has something to divide by
    found = jax.nn.dot_product_attention(*split, key_value_seq_lengths=least, implementation=implementation)
    return found.reshape(n, length, d)
