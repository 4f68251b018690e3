"""IA3: learned factors on the outputs or the inputs of linear sites (Liu et al. 2022)."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float

from jpets.config import LINEAR_SITES, BackboneConfig
from jpets.deltas.merge import Params, map_kernels
from jpets.deltas.parts import BY_OUTPUTS
from jpets.deltas.protocol import (
    SUM_BYTES,
    ArraySpec,
    Bound,
    ClassKey,
    Contribution,
    Method,
    Place,
    TensorSpec,
    Work,
    covered_layers,
    full_shape,
    layer_bytes,
    normal,
)
from jpets.deltas.recipe import Course
from jpets.deltas.view import RowView, SegmentView
from jpets.errors import InvalidTask
from jpets.types import Delta
from pallas_kernels.numerics import take_slots

INPUTS: Mapping[str, str] = {"into_attn_out": "attn_out", "into_ffn_out": "ffn_out"}
"""Sites that scale the input of a linear site; query, key and value share theirs with the residual."""
DEFAULT_SITES = ("key", "value", "into_ffn_out")
"""The paper's: keys, values, and the feed-forward network's activations."""


def _width(site: str, config: BackboneConfig) -> int:
    return config.dims(INPUTS[site])[0] if site in INPUTS else config.dims(site)[1]


def ia3_delta(factors: Mapping[str, Mapping[int, Float[np.ndarray, " _"]]]) -> Delta:
    """A delta from ``factors[site][layer]``; 1 in layers that a site leaves out."""
    layers = sorted({layer for own in factors.values() for layer in own})
    tensors = {}
    for site, own in factors.items():
        none = np.ones_like(next(iter(own.values())))
        tensors[f"{site}/scale"] = np.stack([own.get(layer, none) for layer in layers])
    return Delta("ia3", {"sites": list(factors), "layers": layers}, tensors)


class Ia3(Method):
    """Settings: ``sites``, ``layers``. Tensors: ``site/scale`` [layers, out] (``into_...``: [layers, in]); 1 changes
    nothing. A site's output is scaled with its bias."""

    name = "ia3"
    kind = "light"
    shares_layers = True
    step = "scale"
    course = Course(rate=1e-2, takes=frozenset({"sites", "layers"}))

    def _sites(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        known = (*LINEAR_SITES, *INPUTS)
        sites = settings.get("sites", DEFAULT_SITES)
        if not sites or set(sites) - set(known):
            raise InvalidTask(f"ia3: sites must be some of {list(known)}, got {list(sites)}")
        return tuple(site for site in known if site in sites)

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers = len(covered_layers(settings, config))
        return {f"{site}/scale": TensorSpec((layers, _width(site, config))) for site in self._sites(settings)}

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        """Random factors around one."""
        specs = self.tensors(settings, config)
        drawn = {name: 1 + normal(rng, scale, full_shape(spec)) for name, spec in specs.items()}
        return Delta("ia3", settings, drawn)

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        ones = {name: np.ones(full_shape(spec), np.float32) for name, spec in self.tensors(settings, config).items()}
        return Delta("ia3", settings, ones)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        sites = self._sites(delta.settings)
        key = ClassKey("ia3", tuple((site, 0) for site in sites), covered_layers(delta.settings, config))
        return [Contribution(key, {f"{site}/scale": delta.tensors[f"{site}/scale"] for site in sites})]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        divided = BY_OUTPUTS | INPUTS.keys()
        return {
            f"{site}/scale": ArraySpec(
                (len(key.layers), _width(site, config)), fill=1, split=1 if site in divided else None
            )
            for site, _ in key.sites
        }

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """One multiplication for each number, and each number is read and written once."""
        width = sum(_width(site, config) for site, _ in key.sites)
        moved = 2 * SUM_BYTES * width
        return Work(tokens * width, tasks * layer_bytes(self.bank_arrays(key, config)) + tokens * moved)

    def inputs(self, bound: Bound, place: Place, x: Float[Array, "t i"]) -> Float[Array, "t i"]:
        return self._scale(bound, place.layer, f"into_{place.site}", x)

    def scale(self, bound: Bound, place: Place, y: Float[Array, "t o"]) -> Float[Array, "t o"]:
        return self._scale(bound, place.layer, place.site, y)

    def _scale(self, bound: Bound, layer: int, site: str, values: Float[Array, "t d"]) -> Float[Array, "t d"]:
        view = bound.view
        assert isinstance(view, (RowView, SegmentView))
        at = bound.entry(layer)

        def take(bank: Array, slots: Array) -> Array:
            return take_slots(bank, slots, at)[:, None].astype(values.dtype)

        return view.combine(values, operator.mul, bound.launch(take, bound.bank[f"{site}/scale"], view.slots))

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        layers, layout = covered_layers(delta.settings, config), config.bias_layout()
        bias = params["bias"]
        columns: dict[tuple[int, str], npt.NDArray[Any]] = {}
        rows: dict[tuple[int, str], npt.NDArray[Any]] = {}
        for site in self._sites(delta.settings):
            for at, layer in enumerate(layers):
                factors = delta.tensors[f"{site}/scale"][at]
                if site in INPUTS:
                    rows[layer, INPUTS[site]] = factors[:, None]
                else:
                    columns[layer, site] = factors[None]
                    bias = bias.at[layout[layer, site]].multiply(jnp.asarray(factors, bias.dtype))
        for factors in (rows, columns):
            params = map_kernels(params, config, operator.mul, factors)
        return {**params, "bias": bias}
