"""A fully fine-tuned model in one bit a weight: x W + s (x sign(D)), with a scale s for each matrix (Liu et al.
2024)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float

from jpets.config import LINEAR_SITES, BackboneConfig
from jpets.deltas.bitfit import Bitfit
from jpets.deltas.merge import Params, map_kernels, weights_of
from jpets.deltas.parts import own_part, spread
from jpets.deltas.protocol import (
    PARAM_BYTES,
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
    covered_sites,
    layer_bytes,
    layers_of,
    plane_bytes,
    plane_spec,
    site_layers,
    weight_places,
)
from jpets.deltas.recipe import Course, Direct, Full, Lesson, Stage, Tree
from jpets.deltas.view import HeavyView
from jpets.types import Delta
from pallas_kernels.masked_matmul import SIGNED, pack_planes, sign_matmul, signs

Differences = Mapping[str, Mapping[int, Float[np.ndarray, "_ _"]]]
TENSORS = ("signs", "scale")


def onebit_delta(differences: Differences) -> Delta:
    """The closest delta to ``differences[site][layer]`` [in, out]: signs, and mean magnitudes, which are the best
    scales."""
    layers = layers_of(differences)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for site, by_layer in differences.items():
        dense = np.stack([np.asarray(by_layer[layer], np.float32) for layer in site_layers(site, layers)])
        tensors[f"{site}/signs"] = pack_planes(dense > 0)
        tensors[f"{site}/scale"] = np.abs(dense).mean((1, 2))
    return Delta("onebit", {"sites": list(differences), "layers": list(layers)}, tensors)


RATE = 1e-4
"""Learning rate of the scales."""


def _whole_then_scales(lesson: Lesson) -> Stage:
    """BitDelta: a full fine-tune, then the signs of its difference are fixed, their scales trained and the biases
    kept."""
    config, base = lesson.config, lesson.base

    def scales(tree: Tree) -> Stage:
        before, after = weights_of(base, config), weights_of(tree, config)
        changes = {site: dict(enumerate(np.asarray(after[site] - before[site]))) for site in before}
        biases = Bitfit().start(np.random.default_rng(0), {}, config, tree)
        return Stage(Direct((onebit_delta(changes), biases), RATE, keeps_weights=False), 1)

    return Stage(Full(base), lesson.epochs, scales)


class Onebit(Method):
    """Settings: ``sites``, ``layers``. Tensors: ``site/signs``, uint8 bit planes [layers, in, out / 8], 1 = plus, and
    ``site/scale`` [layers]."""

    name = "onebit"
    kind = "heavy"
    shares_layers = True
    step = "sums"
    course = Course(RATE, first=_whole_then_scales)

    def check_training(self, settings: Mapping[str, Any], config: BackboneConfig) -> None:
        super().check_training(settings, config)
        for site in LINEAR_SITES:
            plane_bytes("onebit", site, config)

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers = covered_layers(settings, config)
        specs: dict[str, TensorSpec] = {}
        for site in covered_sites(settings, config):
            covered = len(site_layers(site, layers))
            specs[f"{site}/signs"] = TensorSpec((covered, *plane_bytes("onebit", site, config)), "bits")
            specs[f"{site}/scale"] = TensorSpec((covered,))
        return specs

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        self.tensors(settings, config)  # refuses a backbone whose signs fill no whole bytes
        layers = covered_layers(settings, config)
        drawn = {
            site: {at: rng.normal(0, scale, config.dims(site)) for at in site_layers(site, layers)}
            for site in covered_sites(settings, config)
        }
        return onebit_delta(drawn)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        sites = [site for site in covered_sites(delta.settings, config) if site != "pooler"]
        if not sites:
            return []
        key = ClassKey("onebit", tuple((site, 0) for site in sites), covered_layers(delta.settings, config))
        arrays = {f"{site}/signs": delta.tensors[f"{site}/signs"] for site in sites}
        arrays |= {f"{site}/scale": delta.tensors[f"{site}/scale"][:, None] for site in sites}
        return [Contribution(key, arrays)]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        specs: dict[str, ArraySpec] = {}
        for site, _ in key.sites:
            specs[f"{site}/signs"] = plane_spec(site, (len(key.layers), *plane_bytes("onebit", site, config)))
            specs[f"{site}/scale"] = ArraySpec((len(key.layers), 1), "float32")
        return specs

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """A dense product with signs, which are read once for each task; x is read, y is read and written."""
        dims = [config.dims(site) for site, _ in key.sites]
        flops = sum(2 * tokens * inputs * outputs for inputs, outputs in dims)
        moved = sum(PARAM_BYTES * inputs + 2 * SUM_BYTES * outputs for inputs, outputs in dims)
        return Work(flops, tasks * layer_bytes(self.bank_arrays(key, config)) + tokens * moved)

    def addition(self, bound: Bound, place: Place, x: Float[Array, "t i"]) -> Float[Array, "k s p"] | None:
        compute = SIGNED.get(bound.operators["sign_matmul"])
        return None if compute is None else self._launch(compute, bound, place, x)

    def total(self, bound: Bound, place: Place, x: Float[Array, "t i"], y: Float[Array, "t p"]) -> Float[Array, "t p"]:
        return self._launch(sign_matmul, bound, place, x, y)

    def _launch(self, compute: Callable[..., Array], bound: Bound, place: Place, x: Array, *outputs: Array) -> Array:
        view, at = bound.view, bound.entry(place.layer)
        assert isinstance(view, HeavyView)
        bits, scale = (bound.bank[f"{place.site}/{name}"] for name in TENSORS)
        operator = functools.partial(compute, size=view.size, layer=at)
        wide = (spread(y, 8 * bits.shape[-1]) for y in outputs)
        return own_part(bound.launch(operator, x, *wide, bits, scale, view.runs), place.own.outputs)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        parts = {
            (layer, site): tuple(jnp.asarray(delta.tensors[f"{site}/{name}"][at]) for name in TENSORS)
            for at, layer, site in weight_places(delta.settings, config)
        }
        return map_kernels(params, config, _add_signs, parts)


def _add_signs(w: Float[Array, "i o"], part: tuple[Array, Array]) -> Float[Array, "i o"]:
    bits, scale = part
    return w + scale.astype(w.dtype) * signs(bits, w.dtype)
