"""Prefix tuning: keys and values of the task's own before those of the text, in every layer (Li and Liang 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas.protocol import (
    PARAM_BYTES,
    SUM_BYTES,
    ArraySpec,
    Bound,
    ClassKey,
    Contribution,
    Lead,
    Method,
    TensorSpec,
    Work,
    covered_layers,
    full_shape,
    layer_bytes,
    normal,
    size_step,
    virtual_tokens,
)
from jpets.deltas.recipe import Course
from jpets.deltas.view import SlotView
from jpets.errors import InvalidInput, InvalidTask
from jpets.types import Delta
from pallas_kernels.numerics import take_counts, take_slots
from pallas_kernels.packed_attention import Prefix as ExtraKeys

SITE = "attn_kv"


class Prefix(Method):
    """Settings: ``tokens``, ``layers``, ``first_position`` (0; if the model counted the prefix, its length).

    Tensors: ``attn_kv/key`` and ``attn_kv/value`` [layers, tokens, d], as attention reads them: already projected.
    """

    name = "prefix"
    kind = "row"
    shares_layers = True
    step = "attention"
    usual: ClassVar[Mapping[str, Any]] = {"tokens": 16}
    course = Course(rate=1e-2, takes=frozenset({"tokens", "first_position", "layers"}), sizes=("tokens",))

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        tokens, first = virtual_tokens("prefix", settings, config), settings.get("first_position", 0)
        if not isinstance(first, int) or not 0 <= first < config.max_positions:
            raise InvalidTask(
                f"prefix: first_position must be a whole number below {config.max_positions}, got {first!r}"
            )
        shape = (len(covered_layers(settings, config)), tokens, config.hidden_size)
        return {f"{SITE}/{part}": TensorSpec(shape) for part in ("key", "value")}

    def check_training(self, settings: Mapping[str, Any], config: BackboneConfig) -> None:
        super().check_training(settings, config)
        try:
            self.tensors({**self.usual, **{n: own for n, own in settings.items() if n != "layers"}}, config)
        except InvalidTask as error:
            raise InvalidInput(error.message) from error

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        settings = {"tokens": 16, **settings}
        specs = self.tensors(settings, config)
        return Delta("prefix", settings, {name: normal(rng, scale, full_shape(spec)) for name, spec in specs.items()})

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        layers, tokens = covered_layers(delta.settings, config), delta.settings["tokens"]
        key = ClassKey("prefix", ((SITE, size_step(tokens)),), layers)
        counts = np.full((len(layers), 1), tokens, np.uint16)
        return [Contribution(key, {**delta.tensors, f"{SITE}/count": counts})]

    def lead(self, delta: Delta) -> Lead:
        return Lead(first_position=delta.settings.get("first_position", 0))

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        ((_, tokens),) = key.sites
        kept = ArraySpec((len(key.layers), tokens, config.hidden_size), split=2)
        return {
            f"{SITE}/key": kept,
            f"{SITE}/value": kept,
            f"{SITE}/count": ArraySpec((len(key.layers), 1), "uint16"),
        }

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """Scores and their sums over the prefix; queries are read, the context is written."""
        ((_, extra),) = key.sites
        moved = (PARAM_BYTES + SUM_BYTES) * config.hidden_size
        kept = tasks * layer_bytes(self.bank_arrays(key, config))
        return Work(4 * tokens * extra * config.hidden_size, kept + tokens * moved)

    def context(self, bound: Bound, layer: int) -> ExtraKeys:
        view, at = bound.view, bound.entry(layer)
        assert isinstance(view, SlotView)
        key, value = (take_slots(bound.bank[f"{SITE}/{part}"], view.slots, at) for part in ("key", "value"))
        return ExtraKeys(key, value, take_counts(bound.bank[f"{SITE}/count"], view.slots, at))
