"""MaskBert: x (W . M), one bit for each weight of each linear site (Zhao et al. 2020; PetS section 3.1)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jpets.config import LINEAR_SITES, BackboneConfig
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
    full_shape,
    layer_bytes,
    plane_bytes,
    plane_spec,
    site_layers,
    weight_places,
)
from jpets.deltas.recipe import Course, Lesson, Recipe, Stage, Tree, WithoutPenalty
from jpets.deltas.view import HeavyView
from jpets.errors import InvalidInput
from jpets.types import Delta
from pallas_kernels.masked_matmul import MASKED, apply_mask, masked_matmul, pack_planes, signs

KEPT = 0.95
"""Share of each weight matrix that a mask keeps (PetS Table 4)."""
SAMPLE = 4096
"""Scores of a matrix in the sample from which its threshold is estimated at every step."""


@dataclasses.dataclass(frozen=True)
class MaskScores(WithoutPenalty):
    """MaskBert (Zhao et al. 2020): a score a weight; the highest 95 % of each matrix are kept, and the gradient of a
    score is taken as if the mask were the score (straight-through, Bengio et al. 2013)."""

    base: Params
    config: BackboneConfig
    earlier: Delta | None = None
    """A mask to continue from. Raises ``InvalidInput`` if it covers only some of the matrices."""
    rate: float = 3e-2
    keeps_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.earlier is None:
            return
        settings, config = self.earlier.settings, self.config
        sites, layers = covered_sites(settings, config), covered_layers(settings, config)
        if (sites, layers) != (LINEAR_SITES, tuple(range(config.layers))):
            raise InvalidInput(
                f"mask: training goes on from masks of {list(LINEAR_SITES)} in all layers, found {list(sites)} in "
                f"layers {list(layers)}; train a new task"
            )

    def start(self, rng: np.random.Generator) -> Tree:
        """The weights' relative magnitudes: at first the smallest weights, which matter least, are off. With an earlier
        mask, the magnitudes of its switched-off weights are negative."""
        del rng
        weights = weights_of(self.base, self.config)
        scores = {site: jnp.abs(w) / jnp.sqrt((w * w).mean((1, 2), keepdims=True)) for site, w in weights.items()}
        if self.earlier is None:
            return scores
        bits = {site: self.earlier.tensors[f"{site}/bits"] for site in scores}
        return {
            site: own * jnp.stack([signs(jnp.asarray(each), own.dtype) for each in bits[site]])
            for site, own in scores.items()
        }

    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        del key

        def masked(w: Float[Array, "i o"], own: Float[Array, "i o"]) -> Float[Array, "i o"]:
            hard = kept(jax.lax.stop_gradient(own)).astype(w.dtype)
            return w * (hard + (own - jax.lax.stop_gradient(own)).astype(w.dtype))

        places = {(at, site): own[at] for site, own in tree.items() for at in range(self.config.layers)}
        return map_kernels(base, self.config, masked, places), ()

    def finish(self, tree: Tree) -> Sequence[Delta]:
        bits = {f"{site}/bits": pack_planes(np.stack([kept(one) for one in own])) for site, own in tree.items()}
        return [Delta("mask", {"sites": list(tree), "layers": list(range(self.config.layers))}, bits)]


def kept(scores: Float[Array, "i o"]) -> Bool[Array, "i o"]:
    """The weights with the highest scores, a share of ``KEPT`` to within sampling error."""
    sample = scores.reshape(-1)[:: scores.size // SAMPLE | 1]  # an odd step visits all rows and columns
    return scores > jnp.quantile(sample, 1 - KEPT)


def _scores(lesson: Lesson) -> Stage:
    return Stage(MaskScores(lesson.base, lesson.config), lesson.epochs)


def _scores_again(lesson: Lesson, earlier: Delta) -> Recipe:
    return MaskScores(lesson.base, lesson.config, earlier)


class Mask(Method):
    """Settings: ``sites``, ``layers``. Tensors: ``site/bits``, uint8 bit planes [layers, in, out / 8], 1 = kept."""

    name = "mask"
    kind = "heavy"
    shares_layers = True
    step = "weight"
    repeatable = False  # the second would replace what the first computed
    standard = True
    course = Course(None, first=_scores, again=_scores_again)

    def check_training(self, settings: Mapping[str, Any], config: BackboneConfig) -> None:
        super().check_training(settings, config)
        for site in LINEAR_SITES:
            plane_bytes("mask", site, config)

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers = covered_layers(settings, config)
        specs: dict[str, TensorSpec] = {}
        for site in covered_sites(settings, config):
            planes = len(site_layers(site, layers)), *plane_bytes("mask", site, config)
            specs[f"{site}/bits"] = TensorSpec(planes, "bits")
        return specs

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        """Masks that keep ``KEPT``; ``scale`` has no meaning for bits."""
        del scale
        tensors = {}
        for name, spec in self.tensors(settings, config).items():
            *lead, bytes_out = full_shape(spec)
            tensors[name] = pack_planes(rng.random((*lead, bytes_out * 8), np.float32) < KEPT)
        return Delta("mask", settings, tensors)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        sites = [site for site in covered_sites(delta.settings, config) if site != "pooler"]
        if not sites:
            return []
        key = ClassKey("mask", tuple((site, 0) for site in sites), covered_layers(delta.settings, config))
        return [Contribution(key, {f"{site}/bits": delta.tensors[f"{site}/bits"] for site in sites})]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        return {
            f"{site}/bits": plane_spec(site, (len(key.layers), *plane_bytes("mask", site, config)), fill=255)
            for site, _ in key.sites
        }

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """A dense product with the task's own weight: bits and shared weight are read for each task, y is written."""
        dims = [config.dims(site) for site, _ in key.sites]
        weights = sum(inputs * outputs for inputs, outputs in dims)
        moved = sum(PARAM_BYTES * inputs + SUM_BYTES * outputs for inputs, outputs in dims)
        slot = layer_bytes(self.bank_arrays(key, config)) + PARAM_BYTES * weights
        return Work(2 * tokens * weights, tasks * slot + tokens * moved)

    def product(
        self, bound: Bound, place: Place, x: Float[Array, "t i"], w: Float[Array, "i p"]
    ) -> Float[Array, "k s p"] | None:
        compute = MASKED.get(bound.operators["masked_matmul"])
        return None if compute is None else self._launch(compute, bound, place, x, w)

    def weight(
        self,
        bound: Bound,
        place: Place,
        x: Float[Array, "t i"],
        y: Float[Array, "t p"],
        w: Float[Array, "i p"],
    ) -> Float[Array, "t p"]:
        return self._launch(masked_matmul, bound, place, x, y, w)

    def _launch(self, compute: Callable[..., Array], bound: Bound, place: Place, x: Array, *arrays: Array) -> Array:
        view = bound.view
        assert isinstance(view, HeavyView)
        bits, at = bound.bank[f"{place.site}/bits"], bound.entry(place.layer)
        outputs = 8 * bits.shape[-1]  # all of the site's where devices cannot share its bytes evenly
        operator = functools.partial(compute, size=view.size, layer=at)
        wide = bound.launch(operator, x, *(spread(array, outputs) for array in arrays), bits, view.runs)
        return own_part(wide, place.own.outputs)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        bits = {
            (layer, site): jnp.asarray(delta.tensors[f"{site}/bits"][at])
            for at, layer, site in weight_places(delta.settings, config)
        }
        return map_kernels(params, config, apply_mask, bits)
