"""Changing single weights inside a backbone's parameter tree, for the methods' dense forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jpets.config import LINEAR_SITES, BackboneConfig
from pallas_kernels.numerics import AnyArray

Params = dict[str, Any]
"""A backbone's parameters: arrays in nested dicts."""
Stacked = Mapping[str, Float[Array, "l i o"]]
"""The layers' weights of each linear site."""
FUSED = {"query": 0, "key": 1, "value": 2}
"""Query, key and value lie side by side in one ``qkv`` weight; the number is the site's block of columns."""

Change = Callable[[Any, Any], Float[Array, "i o"]]


def kernel(params: Params, config: BackboneConfig, layer: int, site: str) -> Float[AnyArray, "i o"]:
    """One linear site's weight out of a parameter tree."""
    if site == "pooler":
        return params["pooler"]
    if site in FUSED:
        d = config.hidden_size
        return params["layers"][layer]["qkv"][:, FUSED[site] * d : (FUSED[site] + 1) * d]
    return params["layers"][layer][site]


def map_kernels(params: Params, config: BackboneConfig, change: Change, parts: Mapping[tuple[int, str], Any]) -> Params:
    """A copy of ``params`` where ``change(weight, parts[layer, site])`` replaces those weights."""
    changed = {place: change(kernel(params, config, *place), part) for place, part in parts.items()}

    def place_in(layer: int, leaves: Params) -> Params:
        own = {site: w for (at, site), w in changed.items() if at == layer and site in leaves}
        if any((layer, site) in changed for site in FUSED):
            parts = [
                changed[layer, site] if (layer, site) in changed else kernel(params, config, layer, site)
                for site in FUSED
            ]
            own["qkv"] = jnp.concatenate(parts, axis=1)
        return {**leaves, **own}

    layers = {layer: place_in(layer, leaves) for layer, leaves in params["layers"].items()}
    pooler = {"pooler": changed[0, "pooler"]} if (0, "pooler") in changed else {}
    return {**params, "layers": layers, **pooler}


def weights_of(params: Params, config: BackboneConfig) -> dict[str, Float[Array, "l i o"]]:
    """The layers' linear weights by site, f32."""
    return {
        site: jnp.stack([jnp.asarray(kernel(params, config, at, site), jnp.float32) for at in range(config.layers)])
        for site in LINEAR_SITES
    }


def with_weights(params: Params, config: BackboneConfig, new: Stacked) -> Params:
    """``params`` with other weights at the layers' linear sites."""
    places = {(at, site): own[at] for site, own in new.items() for at in range(config.layers)}
    return map_kernels(params, config, lambda w, own: own.astype(w.dtype), places)
