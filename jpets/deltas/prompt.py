"""Prompt tuning: embeddings of virtual tokens before those of the text (Lester et al. 2021)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpets.config import BackboneConfig
from jpets.deltas.merge import Params
from jpets.deltas.protocol import (
    SUM_BYTES,
    ArraySpec,
    Bound,
    ClassKey,
    Contribution,
    Lead,
    Method,
    TensorSpec,
    Work,
    full_shape,
    normal,
    size_step,
    virtual_tokens,
)
from jpets.deltas.recipe import INIT_SCALE, Course
from jpets.deltas.view import SlotView
from jpets.types import Delta
from pallas_kernels.numerics import take_counts, take_slots

SITE = "embeddings"


class Prompt(Method):
    """Settings: ``tokens``. Tensors: ``embeddings/prompt`` [1, tokens, width], in the place of word embeddings.

    Virtual tokens get the first positions and type 0, and are tokens like others: a head that reads the first token
    reads a virtual one, a mean includes them. Token heads answer only for the text's own tokens.
    """

    name = "prompt"
    kind = "row"
    shares_layers = True
    step = "embeddings"
    repeatable = False
    usual: ClassVar[Mapping[str, Any]] = {"tokens": 8}
    course = Course(rate=3e-2, takes=frozenset({"tokens"}), sizes=("tokens",), settings={"tokens": 16})

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        tokens = virtual_tokens("prompt", settings, config)
        return {f"{SITE}/prompt": TensorSpec((1, tokens, config.embedding_width))}

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        settings = {"tokens": 8, **settings}
        specs = self.tensors(settings, config)
        return Delta("prompt", settings, {name: normal(rng, scale, full_shape(spec)) for name, spec in specs.items()})

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        """Embeddings of random words (Lester et al. 2021)."""
        delta = self.init(rng, settings, config, INIT_SCALE)
        chosen = rng.integers(0, config.vocab_size, delta.settings["tokens"])
        own = np.asarray(base["word"])[chosen][None].astype(np.float32)
        return dataclasses.replace(delta, tensors={f"{SITE}/prompt": own})

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        tokens = delta.settings["tokens"]
        key = ClassKey("prompt", ((SITE, size_step(tokens)),), (0,))
        return [Contribution(key, {**delta.tensors, f"{SITE}/count": np.full((1, 1), tokens, np.uint16)})]

    def lead(self, delta: Delta) -> Lead:
        return Lead(tokens=delta.settings["tokens"])

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        ((_, tokens),) = key.sites
        return {
            f"{SITE}/prompt": ArraySpec((1, tokens, config.embedding_width)),
            f"{SITE}/count": ArraySpec((1, 1), "uint16"),
        }

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """A query's virtual tokens, copied once for each task; their cost in the layers is part of the query's
        length."""
        numbers = sum(size for _, size in key.sites) * config.embedding_width
        kept = self.bank_arrays(key, config)[f"{SITE}/prompt"].nbytes
        return Work(tasks * numbers, tasks * (kept + SUM_BYTES * numbers))

    def embed(self, bound: Bound, x: Float[Array, "t d"], first_token: Int[Array, " n"]) -> Float[Array, "t d"]:
        view = bound.view
        assert isinstance(view, SlotView)
        own = take_slots(bound.bank[f"{SITE}/prompt"], view.slots, 0)  # [N, P, d]
        each = jnp.arange(own.shape[1])
        held = each < take_counts(bound.bank[f"{SITE}/count"], view.slots, 0)[:, None]  # [N, P]
        behind = x.shape[0] + jnp.arange(held.size).reshape(held.shape)  # no two places are alike
        at = jnp.where(held, first_token[:, None] + each, behind).reshape(-1)
        return x.at[at].set(own.reshape(-1, x.shape[1]).astype(x.dtype), mode="drop", unique_indices=True)
