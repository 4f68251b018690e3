"""BitFit: a task's own biases at every linear and norm site, the embedding norm's too (PetS Table 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpets.config import LINEAR_SITES, NORM_SITES, BackboneConfig
from jpets.deltas.merge import Params
from jpets.deltas.protocol import (
    PARAM_BYTES,
    SUM_BYTES,
    ArraySpec,
    ClassKey,
    Contribution,
    Method,
    TensorSpec,
    Work,
    covered_layers,
    full_shape,
    normal,
    site_layers,
)
from jpets.deltas.recipe import Course
from jpets.errors import InvalidTask
from jpets.types import Delta

BIAS_CLASS = ClassKey("bitfit")
"""One bank of whole bias vectors serves every method that changes biases; slot 0 holds the backbone's."""


def bias_sites(config: BackboneConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(site for _, site in config.bias_layout()))


class Bitfit(Method):
    """Settings: ``sites`` (all by default), ``layers``. Tensors: ``site/bias``, whole biases that replace the
    backbone's."""

    name = "bitfit"
    kind = "row"
    shares_layers = True
    step = "bias"
    standard = True
    course = Course(rate=3e-3, takes=frozenset({"sites", "layers"}))

    def _sites(self, settings: Mapping[str, Any], config: BackboneConfig) -> tuple[str, ...]:
        known = bias_sites(config)
        sites = settings.get("sites", known)
        if not sites or set(sites) - set(known):
            raise InvalidTask(f"bitfit: sites must be some of {list(known)}, got {list(sites)}")
        return tuple(site for site in known if site in sites)

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers, layout = covered_layers(settings, config), config.bias_layout()

        def width(site: str) -> int:
            part = layout[0, site]
            return part.stop - part.start

        return {
            f"{site}/bias": TensorSpec((len(site_layers(site, layers)), width(site)))
            for site in self._sites(settings, config)
        }

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        specs = self.tensors(settings, config)
        return Delta("bitfit", settings, {name: normal(rng, scale, full_shape(spec)) for name, spec in specs.items()})

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        """The backbone's own biases; the pooler's only if asked for, those of the embeddings' norm also with the first
        layer."""
        self.tensors(settings, config)  # raises if the settings are wrong
        bias, layout = np.asarray(base["bias"], np.float32), config.bias_layout()
        layers = covered_layers(settings, config)
        below = ("embeddings_norm",) if 0 in layers else ()
        sites = tuple(settings.get("sites", (*below, *LINEAR_SITES, *NORM_SITES)))
        tensors = {
            f"{site}/bias": np.stack([bias[layout[at, site]] for at in site_layers(site, layers)]) for site in sites
        }
        return Delta("bitfit", {"sites": list(sites), "layers": list(layers)}, tensors)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        layout, layers = config.bias_layout(), covered_layers(delta.settings, config)
        own = np.zeros(config.bias_size(), bool)
        values = np.zeros(config.bias_size(), np.float32)
        for site in self._sites(delta.settings, config):
            for at, layer in enumerate(site_layers(site, layers)):
                own[layout[layer, site]] = True
                values[layout[layer, site]] = delta.tensors[f"{site}/bias"][at]
        return [Contribution(BIAS_CLASS, {"own": own, "values": values})]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        return {"bias": ArraySpec((1, config.bias_size()))}

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """One addition for each bias of a layer; outputs are read and written."""
        width = sum(config.dims(site)[1] for site in LINEAR_SITES) + len(NORM_SITES) * config.hidden_size
        return Work(tokens * width, tasks * PARAM_BYTES * width + tokens * 2 * SUM_BYTES * width)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        layout, layers, bias = config.bias_layout(), covered_layers(delta.settings, config), params["bias"]
        for site in self._sites(delta.settings, config):
            for at, layer in enumerate(site_layers(site, layers)):
                bias = bias.at[layout[layer, site]].set(jnp.asarray(delta.tensors[f"{site}/bias"][at], bias.dtype))
        return {**params, "bias": bias}
