"""MaskBert: x (W . M), one bit for each weight of each linear site (Zhao et al. 2020; PetS section 3.1)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jpets.config import BackboneConfig
from jpets.deltas.merge import map_kernels
from jpets.deltas.protocol import (
    PARAM_BYTES,
    SUM_BYTES,
    ArraySpec,
    Bound,
    ClassKey,
    Contribution,
    Method,
    Params,
    Place,
    TensorSpec,
    Work,
    covered_layers,
    covered_sites,
    full_shape,
    layer_bytes,
    site_layers,
    weight_places,
)
from jpets.deltas.view import HeavyView
from jpets.types import Delta
from pallas_kernels.masked_matmul import apply_mask, masked_matmul, pack_planes


class Mask(Method):
    """Settings: ``sites``, ``layers``. Tensors: ``site/bits``, uint8 bit planes [layers, in, out / 8], 1 = kept."""

    name = "mask"
    kind = "heavy"
    step = "weight"
    repeatable = False  # the second would replace what the first computed

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers = covered_layers(settings, config)
        specs: dict[str, TensorSpec] = {}
        for site in covered_sites(settings, config):
            inputs, outputs = config.dims(site)
            specs[f"{site}/bits"] = TensorSpec((len(site_layers(site, layers)), inputs, outputs // 8), "bits")
        return specs

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        """Masks that keep 95 % (PetS Table 4); ``scale`` has no meaning for bits."""
        del scale
        tensors = {}
        for name, spec in self.tensors(settings, config).items():
            *lead, bytes_out = full_shape(spec)
            tensors[name] = pack_planes(rng.random((*lead, bytes_out * 8), np.float32) < 0.95)
        return Delta("mask", settings, tensors)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        sites = [site for site in covered_sites(delta.settings, config) if site != "pooler"]
        if not sites:
            return []
        key = ClassKey("mask", tuple((site, 0) for site in sites), covered_layers(delta.settings, config))
        return [Contribution(key, {f"{site}/bits": delta.tensors[f"{site}/bits"] for site in sites})]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        dims = {site: config.dims(site) for site, _ in key.sites}
        return {
            f"{site}/bits": ArraySpec((len(key.layers), inputs, outputs // 8), "uint8", fill=255)
            for site, (inputs, outputs) in dims.items()
        }

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """A dense product with the task's own weight: bits and shared weight are read for each task, y is written."""
        dims = [config.dims(site) for site, _ in key.sites]
        weights = sum(inputs * outputs for inputs, outputs in dims)
        moved = sum(PARAM_BYTES * inputs + SUM_BYTES * outputs for inputs, outputs in dims)
        slot = layer_bytes(self.bank_arrays(key, config)) + PARAM_BYTES * weights
        return Work(2 * tokens * weights, tasks * slot + tokens * moved)

    def weight(
        self,
        bound: Bound,
        place: Place,
        x: Float[Array, "t i"],
        y: Float[Array, "t o"],
        w: Float[Array, "i p"],
    ) -> Float[Array, "t o"]:
        view = bound.view
        assert isinstance(view, HeavyView)
        bits, at = bound.bank[f"{place.site}/bits"], bound.key.layers.index(place.layer)
        operator = functools.partial(masked_matmul, size=view.size, layer=at)
        return bound.launch(operator, x, y, w, bits, view.runs)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        bits = {
            (layer, site): jnp.asarray(delta.tensors[f"{site}/bits"][at])
            for at, layer, site in weight_places(delta.settings, config)
        }
        return map_kernels(params, config, apply_mask, bits)
