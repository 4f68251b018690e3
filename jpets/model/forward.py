"""One macro-batch through the encoder, the poolings and the heads: the function that every program computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jpets.deltas.head import apply_head
from jpets.deltas.operators import REFERENCES, Operators
from jpets.deltas.sites import BiasRange, BoundClass, Sites
from jpets.model.batch import PackedBatch
from jpets.model.encoder import Encoder, Params, SplitEncoder


class Outputs(NamedTuple):
    """``pooled`` [N, d] and ``finite`` [N] in row order; ``logits`` one array a head class, in the order given."""

    pooled: Float[Array, "n d"]
    finite: Bool[Array, " n"]
    logits: tuple[Float[Array, "g s c"], ...]


def bind_sites(
    encoder: SplitEncoder,
    params: Params,
    batch: PackedBatch,
    bound: Sequence[BoundClass] = (),
    operators: Operators = REFERENCES,
    biases: BiasRange | None = None,
) -> Sites:
    """What the model calls wherever a delta may act in ``batch``; ``operators`` are the model's own."""
    return Sites(encoder.config, params["bias"], batch.row_count, batch.row_of_token, bound, operators, biases)


def encode(
    encoder: SplitEncoder, params: Params, batch: PackedBatch, bound: Sequence[BoundClass] = ()
) -> Float[Array, "t d"]:
    """Final hidden states of the packed tokens, f32."""
    return encoder.bind(params)(batch, bind_sites(encoder, params, batch, bound))


def mean_pool(hidden: Float[Array, "t d"], batch: PackedBatch) -> Float[Array, "n d"]:
    """Mean over each row's tokens; zeros for rows without any."""
    means = []
    for group in batch.groups:
        view = group.rows(hidden)
        own = jnp.arange(view.shape[1])[None] < group.lengths[:, None]
        sums = jnp.where(own[..., None], view, 0).sum(1)
        means.append(sums / jnp.maximum(group.lengths, 1)[:, None].astype(jnp.float32))
    return jnp.concatenate(means)


def forward(
    encoder: SplitEncoder,
    params: Params,
    batch: PackedBatch,
    bound: Sequence[BoundClass] = (),
    operators: Operators = REFERENCES,
) -> Outputs:
    """Encoder, poolings and heads."""
    sites = bind_sites(encoder, params, batch, bound, operators)
    model = encoder.bind(params)
    return read_out(model, model(batch, sites), batch, sites, bound)


def forward_above(
    encoder: SplitEncoder,
    params: Params,
    layers: int,
    below: PackedBatch,
    batch: PackedBatch,
    bound: Sequence[BoundClass] = (),
    operators: Operators = REFERENCES,
) -> Outputs:
    """``forward`` where the embeddings and the first ``layers`` layers are computed for the batch ``below``, without
    deltas; ``batch.ids`` are the places of the tokens of ``batch`` among its tokens."""
    model = encoder.bind(params)
    hidden = model.lower(layers, below, bind_sites(encoder, params, below, operators=operators))
    sites = bind_sites(encoder, params, batch, bound, operators)
    hidden = model.upper(layers, hidden.at[batch.ids].get(mode="clip"), batch, sites)
    return read_out(model, hidden, batch, sites, bound)


def read_out(
    model: Encoder, hidden: Float[Array, "t d"], batch: PackedBatch, sites: Sites, bound: Sequence[BoundClass] = ()
) -> Outputs:
    """Poolings and heads of final hidden states. ``finite`` is false for a row with a NaN or Inf."""
    first = hidden.at[batch.rows.first_token].get(mode="fill", fill_value=0)
    mean = mean_pool(hidden, batch)
    pooling = batch.rows.pooling[:, None]
    pooled = jnp.where(pooling == 1, mean, first)
    if model.config.pooler:
        pooled = jnp.where(pooling == 2, model.pool(first, sites), pooled)
    heads = [b for b in bound if b.method.kind == "head"]
    logits = tuple(apply_head(head, hidden, pooled) for head in heads)
    return Outputs(pooled, jnp.isfinite(mean).all(-1), logits)
