"""Encoders of the BERT family as Flax NNX modules, and their split form: plain dicts and pure functions.

The families are one stack: DistilBERT has no token types and no pooler, ELECTRA may have embeddings of another width
and a projection behind them, RoBERTa's positions skip the padding tokens that a text spells. All biases of the model
are one flat array, so that a task's own biases are one gather (``BackboneConfig.bias_layout``). Axes: t packed tokens,
d hidden, f feed-forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jpets.config import BackboneConfig
from jpets.deltas.sites import Sites
from jpets.model.batch import PackedBatch
from jpets.model.merging import merged, texts_of_tokens
from jpets.model.positions import position_vectors
from pallas_kernels.numerics import ACTIVATIONS
from pallas_kernels.packed_attention import packed_attention

Params = dict[str, Any]
INIT_STD = 0.02


def _normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param[Array]:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * INIT_STD)


class Layer(nnx.Module):
    """One transformer layer, norms after the residuals (Devlin et al. 2019)."""

    def __init__(self, config: BackboneConfig, rngs: nnx.Rngs) -> None:
        d, f = config.hidden_size, config.intermediate_size
        self.qkv = _normal(rngs, d, 3 * d)
        self.attn_out = _normal(rngs, d, d)
        self.attn_norm = nnx.Param(jnp.ones(d))
        self.ffn_in = _normal(rngs, d, f)
        self.ffn_out = _normal(rngs, f, d)
        self.ffn_norm = nnx.Param(jnp.ones(d))

    def __call__(self, index: int, x: Float[Array, "t d"], batch: PackedBatch, sites: Sites) -> Float[Array, "t d"]:
        parts = sites.linear(index, ("query", "key", "value"), x, self.qkv[...])
        q, k, v = (part.astype(self.qkv.dtype) for part in parts)
        heads = sites.config.heads * q.shape[1] // sites.config.hidden_size  # of several devices, each has its own
        prefixes, candidate = sites.context(index), sites.operators["packed_attention"]
        context = packed_attention(q, k, v, batch.groups, batch.cells, heads, prefixes, candidate)
        (y,) = sites.linear(index, ("attn_out",), context, self.attn_out[...])
        x = sites.close(index, "attn_out", y, x, self.attn_norm[...])
        (h,) = sites.linear(index, ("ffn_in",), x, self.ffn_in[...])
        (y,) = sites.linear(index, ("ffn_out",), ACTIVATIONS[sites.config.activation](h), self.ffn_out[...])
        return sites.close(index, "ffn_out", y, x, self.ffn_norm[...])


class Encoder(nnx.Module):
    """Embeddings, layers and pooler of one backbone."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs) -> None:
        width = config.embedding_width
        self.config = config
        self.word = _normal(rngs, config.vocab_size, width)
        if config.table_rows:
            self.table = nnx.Param(jnp.zeros(config.table_shape, config.table_dtype))
        self.position = _normal(rngs, config.max_positions, width)
        if config.skips_padding:
            self.padding_position = nnx.Param(jnp.zeros(width))
        if config.type_vocab_size:
            self.token_type = _normal(rngs, config.type_vocab_size, width)
        self.embeddings_norm = nnx.Param(jnp.ones(width))
        if config.embedding_size:
            self.embeddings_project = _normal(rngs, *config.dims("embeddings_project"))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.bias = nnx.Param(jnp.zeros(config.bias_size()))
        if config.pooler:
            self.pooler = _normal(rngs, config.hidden_size, config.hidden_size)

    def embed(self, batch: PackedBatch, sites: Sites) -> Float[Array, "t d"]:
        """Sum of the embeddings, normed and, where they have another width, projected, f32. Merged n-gram vectors stand
        for those of words where ``batch.ids`` are rows of tables."""
        if self.config.looks_up:
            before, after = self.config.window
            places, kept_as = range(before + 1 + after), self.config.table_format
            words = merged(self.table[...], batch.ids, texts_of_tokens(batch), places, before, kept_as)
        else:
            words = self.word[...][batch.ids].astype(jnp.float32)
        x = sites.embed(words, batch.rows.first_token)
        padding = self.padding_position[...] if self.config.skips_padding else None
        x = x + position_vectors(self.position[...], padding, batch.positions, self.config).astype(jnp.float32)
        if self.config.type_vocab_size:
            x = x + self.token_type[...][batch.types].astype(jnp.float32)
        x = sites.norm(0, "embeddings_norm", x, self.embeddings_norm[...])
        if self.config.embedding_size:
            (x,) = sites.linear(0, ("embeddings_project",), x, self.embeddings_project[...])
        return x

    def __call__(self, batch: PackedBatch, sites: Sites) -> Float[Array, "t d"]:
        """Final hidden states of the packed tokens, f32."""
        return self.upper(0, self.embed(batch, sites), batch, sites)

    def lower(self, stop: int, batch: PackedBatch, sites: Sites) -> Float[Array, "t d"]:
        """What layer ``stop`` gets, f32."""
        x = self.embed(batch, sites)
        for index in range(stop):
            x = self.layers[index](index, x, batch, sites)
        return x

    def upper(self, first: int, x: Float[Array, "t d"], batch: PackedBatch, sites: Sites) -> Float[Array, "t d"]:
        """Final hidden states, f32, where ``x`` is what layer ``first`` gets."""
        for index in range(first, len(self.layers)):
            x = self.layers[index](index, x, batch, sites)
        return x

    def hidden_states(self, batch: PackedBatch, sites: Sites) -> tuple[Float[Array, "t d"], ...]:
        """The embeddings and every layer's output, f32."""
        states = [self.embed(batch, sites)]
        for index, layer in enumerate(self.layers):
            states.append(layer(index, states[-1], batch, sites))
        return tuple(states)

    def pool(self, first: Float[Array, "n d"], sites: Sites) -> Float[Array, "n d"]:
        """tanh of the pooler's linear layer on each row's first token, f32."""
        return jnp.tanh(sites.pooler(first, self.pooler[...]))


@dataclasses.dataclass(frozen=True)
class SplitEncoder:
    """An encoder taken apart: ``bind(params)`` gives the module for use inside a traced function.

    ``params`` is a plain nested dict of arrays (``abstract_params`` gives shapes): differentiate it, shard it.
    """

    config: BackboneConfig
    graph: nnx.GraphDef[Encoder]
    state: nnx.State[Any, Any]

    def abstract_params(self) -> Params:
        return nnx.to_pure_dict(self.state)

    def bind(self, params: Params) -> Encoder:
        state = jax.tree.map(lambda leaf: leaf, self.state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self.graph, state)


def split(config: BackboneConfig) -> SplitEncoder:
    """The pure form of ``Encoder(config)``, without allocating parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
    return SplitEncoder(config, graph, state)


def random_params(config: BackboneConfig, seed: int = 0) -> Params:
    """Randomly initialised f32 parameters (standard deviation 0.02, as BERT's)."""
    return nnx.to_pure_dict(nnx.state(Encoder(config, rngs=nnx.Rngs(seed)), nnx.Param))


def cast_params(params: Params, dtype: str) -> Params:
    """Weights and biases in ``dtype``; norm scales stay f32, and tables of n-gram vectors what and where they are."""

    def cast(path: tuple[Any, ...], leaf: Any) -> Array:
        name = str(path[-1].key)
        if name == "table":
            own: Array = leaf
            return own
        return jnp.asarray(leaf, jnp.float32 if name.endswith("_norm") else jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(cast, params)
