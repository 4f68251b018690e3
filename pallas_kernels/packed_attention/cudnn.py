"""cuDNN's fused attention for each group of queries: scores never reach device memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

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
    """See ``packed_attention``. The reference attends to numbers or heads that cuDNN does not take.

    ``implementation`` "xla" computes the same on any device, and takes them.
    """
    own = functools.partial(_attend, implementation=implementation)
    return packed_attention_reference(q, k, v, groups, cells, heads, prefixes, attend=own)


LEAST_CAPABILITY = 8.0
"""The first generation of GPUs that cuDNN has fused attention for."""


@functools.cache
def supported() -> bool:
    """Whether this process's GPU and its cuDNN have fused attention. JAX says what it lacks by an error."""
    device = jax.local_devices()[0]
    try:
        capability = float(getattr(device, "compute_capability", 0))
    except ValueError:  # other makers' devices have names there
        return False
    if device.platform != "gpu" or capability < LEAST_CAPABILITY:
        return False
    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.jit(attention).trace(x, x, x).lower(lowering_platforms=("cuda",))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def takes(q: Any, heads: int) -> bool:
    """Whether cuDNN takes numbers and heads like these, [..., d], on every device that it has attention for."""
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
    if not (implementation == "xla" or takes(q, heads)):
        return attend(q, k, v, lengths, heads, prefixes)
    n, length, d = q.shape
    if prefixes:
        k, v, lengths = _closed_up([*prefixes, Prefix(k, v, lengths)], q.dtype)
    q, k, v = (part.reshape(n, -1, heads, d // heads) for part in (q, k, v))
    least = jnp.maximum(lengths, 1)  # a row of no query has something to divide by
    with jax.default_matmul_precision("highest"):  # XLA's products of f32 numbers, which are TF32 on a GPU otherwise
        found = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=least, implementation=implementation)
    return found.reshape(n, length, d)


def _closed_up(
    sources: Sequence[Prefix], dtype: jnp.dtype
) -> tuple[Float[Array, "n l d"], Float[Array, "n l d"], Int[Array, " n"]]:
    """Keys, values and their number: of each row those of all sources that count, without gaps between them."""
    at = jnp.arange(sum(source.key.shape[1] for source in sources), dtype=jnp.int32)[None]
    places, ends = at, jnp.zeros_like(sources[0].counts)
    for source in sources:
        ends = ends + source.counts
        places = places + jnp.where(at >= ends[:, None], (source.key.shape[1] - source.counts)[:, None], 0)

    def gather(parts: Sequence[Array]) -> Array:
        every = jnp.concatenate([part.astype(dtype) for part in parts], axis=1)
        return every.at[jnp.arange(len(every))[:, None], places].get(mode="clip")

    return gather([source.key for source in sources]), gather([source.value for source in sources]), ends
