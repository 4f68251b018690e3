"""The lower layers of a backbone over single n-grams, and the merging of n-grams into the vectors of a text (HMI
sections 3.2.1 and 3.3.1, equation 2; SkipBERT).

Axes: k n-grams of n tokens, p places of an n-gram that have vectors, t packed tokens, d hidden.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpets.config import BackboneConfig
from jpets.errors import InvalidInput
from jpets.model.batch import PackedBatch, Rows
from jpets.model.encoder import Params, SplitEncoder, cast_params, split
from jpets.model.forward import encode
from jpets.model.positions import position_vectors
from jpets.plot.ngrams import MOST_IDS, Window
from pallas_kernels.numerics import take_rows, unit_norm
from pallas_kernels.packed_attention import AttentionGroup

OWN_GATE, OTHER_GATE = 2.0, -1.0
"""Where training begins with the gates: most of a token's vector comes from its own n-gram."""


@dataclasses.dataclass(frozen=True)
class NGramLayers:
    """The first ``count`` layers of a backbone, computed for each n-gram alone.

    Parameters are a plain dict: ``lower``, those of an encoder of ``count`` layers; ``gate``, a weight [p, d] and bias
    [p] of the sigmoid gates; ``merged``, what is added to the sum: ``position`` [positions, d] (``padding_position``
    [d] for padding tokens that take none), ``token_type`` [types, d], and the ``scale`` and ``bias`` [d] of its layer
    norm.
    """

    config: BackboneConfig
    window: Window
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count < self.config.layers:
            raise InvalidInput(f"tables must replace 1 to {self.config.layers - 1} layers, found {self.count}")
        if self.config.vocab_size > MOST_IDS:
            raise InvalidInput(
                f"tables take vocabularies of up to {MOST_IDS:,} tokens, found {self.config.vocab_size:,}"
            )
        if self.config.embedding_size:
            raise InvalidInput("tables take embeddings of the layers' width; this backbone projects them")

    @property
    def lower(self) -> BackboneConfig:
        """The shape of an encoder that ends behind these layers."""
        return dataclasses.replace(self.config, layers=self.count, pooler=False)

    @functools.cached_property
    def _encoder(self) -> SplitEncoder:
        return split(self.lower)

    def start(self, params: Params) -> Params:
        """The parameters with which adapting a backbone begins: its own layers and embeddings, which are added to the
        sum once more; a text's positions are unknown in an n-gram."""
        bias = np.asarray(params["bias"])
        own, whole = self.lower.bias_layout(), self.config.bias_layout()
        lower_bias = np.zeros(self.lower.bias_size(), bias.dtype)
        for place, span in own.items():
            lower_bias[span] = bias[whole[place]]
        names = ("word", "position", "padding_position", "token_type", "embeddings_norm")
        lower = {name: params[name] for name in names if name in params}
        lower |= {"layers": {at: params["layers"][at] for at in range(self.count)}, "bias": lower_bias}
        width, places = self.config.hidden_size, list(self.window.places)
        gates = np.where(np.array(places) == self.window.before, OWN_GATE, OTHER_GATE).astype(np.float32)
        merged = {
            "position": params["position"],
            "token_type": params.get("token_type", np.zeros((1, width), np.float32)),
            "scale": params["embeddings_norm"],
            "bias": bias[whole[0, "embeddings_norm"]],
        }
        if self.config.skips_padding:
            merged["padding_position"] = params["padding_position"]
        gate = {"weight": np.zeros((len(places), width), np.float32), "bias": gates}
        return jax.tree.map(jnp.asarray, {"lower": lower, "gate": gate, "merged": merged})

    def vectors(self, params: Params, grams: Int[Array, "k n"], dtype: str = "float32") -> Float[Array, "k p d"]:
        """The gated vectors of n-grams of raised ids, f32: what tables hold. Zero for a place without a token, which no
        token attends to."""
        order = jnp.argsort(grams == 0, axis=1, stable=True)  # tokens first: attention ends at a length
        ids = jnp.maximum(jnp.take_along_axis(grams, order, 1) - 1, 0).reshape(-1)
        lengths = (grams != 0).sum(1)
        rows = Rows(jnp.arange(len(grams)) * self.window.size, jnp.zeros(len(grams), jnp.int32))
        inputs = {"ids": ids, "types": jnp.zeros_like(ids)}
        batch = PackedBatch(inputs, order.reshape(-1), (AttentionGroup(None, lengths),), None, None, rows)
        hidden = encode(self._encoder, cast_params(params["lower"], dtype), batch)
        each = hidden.reshape(*grams.shape, -1)
        each = jnp.take_along_axis(each, jnp.argsort(order, axis=1)[..., None], 1)
        places = np.array(self.window.places)
        own = each[:, places]
        gate = jax.nn.sigmoid((own * params["gate"]["weight"]).sum(-1) + params["gate"]["bias"])
        return jnp.where((grams[:, places] != 0)[..., None], gate[..., None] * own, 0.0)

    def merge(
        self,
        params: Params,
        vectors: Float[Array, "t p d"],
        text_of_token: Int[Array, " t"],
        positions: Int[Array, " t"],
        types: Int[Array, " t"],
    ) -> Float[Array, "t d"]:
        """What the layers above get, f32: each token's vectors summed over the n-grams that contain it, those of the
        tokens around it in its text, with its position and type, normed."""
        count, merged = len(text_of_token), params["merged"]
        total = jnp.zeros((count, vectors.shape[-1]), jnp.float32)
        for at, place in enumerate(self.window.places):
            of = jnp.arange(count) - (place - self.window.before)  # the token whose n-gram has this one at ``place``
            near = jnp.clip(of, 0, count - 1)
            inside = (of == near) & (text_of_token[near] == text_of_token)
            total += jnp.where(inside[:, None], vectors[near, at].astype(jnp.float32), 0.0)
        total += position_vectors(merged["position"], merged.get("padding_position"), positions, self.config)
        total += take_rows(merged["token_type"], types)
        return unit_norm(total, self.config.norm_eps) * merged["scale"] + merged["bias"]
