"""A backbone in two parts: lower layers that compute single n-grams, and upper layers that compute texts of their
merged vectors (HMI sections 3.2.1 and 3.3.1; SkipBERT).

Axes: k n-grams of n tokens, p places of an n-gram that have vectors, d hidden.
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
from jpets.model.layers import some_layers
from jpets.plot.ngrams import MOST_IDS, Window
from pallas_kernels.packed_attention import AttentionGroup

OWN_GATE, OTHER_GATE = 2.0, -1.0
"""Where training begins with the gates: most of a token's vector comes from its own n-gram."""


@dataclasses.dataclass(frozen=True)
class NGramLayers:
    """The first ``count`` layers of a backbone, computed for each n-gram alone.

    Parameters are a plain dict: ``lower``, those of an encoder of ``count`` layers; ``gate``, a weight [p, d] and bias
    [p] of the sigmoid gates. With ``forms`` (``jpets.plot.forms``) an n-gram's vectors are those of its normal form.
    """

    config: BackboneConfig
    window: Window
    count: int
    forms: Int[np.ndarray, " w"] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.config.looks_up:
            raise InvalidInput(
                "tables take a backbone that computes all its layers; the lower ones of this one are tables already"
            )
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

    @property
    def upper(self) -> BackboneConfig:
        """The shape of the encoder of the layers above, which takes rows of n-grams. Raises ``InvalidInput`` for
        causal windows: encoders see what follows."""
        if self.window.causal:
            raise InvalidInput("an encoder's n-grams must reach to both sides, found a causal window")
        return dataclasses.replace(
            self.config,
            layers=self.config.layers - self.count,
            window=(self.window.before, self.window.after),
        )

    def normal(self, ids: Int[np.ndarray, " t"]) -> Int[np.ndarray, " t"]:
        """The normal forms of token ids; without forms the ids themselves."""
        return ids if self.forms is None else self.forms[ids + 1] - 1

    @functools.cached_property
    def _encoder(self) -> SplitEncoder:
        return split(self.lower)

    def start(self, params: Params) -> Params:
        """The parameters with which adapting a backbone begins: its own."""
        lower = some_layers(params, self.config, self.lower, range(self.count))
        width, places = self.config.hidden_size, list(self.window.places)
        gates = np.where(np.array(places) == self.window.before, OWN_GATE, OTHER_GATE).astype(np.float32)
        gate = {"weight": np.zeros((len(places), width), np.float32), "bias": gates}
        return jax.tree.map(jnp.asarray, {"lower": lower, "gate": gate})

    def start_upper(self, params: Params) -> Params:
        """The parameters with which the upper layers begin: the backbone's own, and its embeddings, which are added to
        the merged vectors once more, for an n-gram does not know where in a text it stands."""
        upper = some_layers(params, self.config, self.upper, range(self.count, self.config.layers))
        if self.config.pooler:
            upper["pooler"] = params["pooler"]
        return jax.tree.map(jnp.asarray, upper)

    def vectors(self, params: Params, grams: Int[Array, "k n"], dtype: str = "float32") -> Float[Array, "k p d"]:
        """The gated vectors of n-grams of raised ids, f32: what tables hold. Zero for a place without a token, which no
        token attends to."""
        if self.forms is not None:
            grams = jnp.asarray(self.forms, grams.dtype)[grams]
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
