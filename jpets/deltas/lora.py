"""LoRA: y + x A B at any subset of the linear sites (Hu et al. 2021), ranks free per site and layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float

from jpets.config import BackboneConfig
from jpets.deltas.merge import Params, map_kernels
from jpets.deltas.parts import BY_INPUTS, BY_OUTPUTS
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
    normal,
    site_layers,
    size_step,
    weight_places,
)
from jpets.deltas.recipe import INIT_SCALE, Course
from jpets.deltas.view import RowView, SegmentView
from jpets.errors import InvalidTask
from jpets.types import Delta
from pallas_kernels.low_rank import low_rank

MAX_ALPHA = 1e6
Matrices = Mapping[str, Mapping[int, tuple[Float[np.ndarray, "_ _"], Float[np.ndarray, "_ _"]]]]


def lora_scale(alpha: float, rank: int, rank_stabilised: bool) -> float:
    """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (Kalajdzievski 2023)."""
    return alpha / (rank**0.5 if rank_stabilised else rank)


def lora_delta(
    matrices: Matrices, *, alpha: Mapping[tuple[str, int], float] | float, rank_stabilised: bool = False
) -> Delta:
    """A delta from ``matrices[site][layer] = (A [in, r], B [r, out])``; folds the scale into B, pads ranks with zeros.

    ``alpha`` is one number or one for each (site, layer). Layers that a site leaves out have rank 0 there.
    """
    layers = layers_of(matrices)
    tensors: dict[str, npt.NDArray[Any]] = {}
    ranks: dict[str, list[int]] = {}
    for site, pairs in matrices.items():
        covered = site_layers(site, layers)
        ranks[site] = [pairs[layer][0].shape[1] if layer in pairs else 0 for layer in covered]
        a0, b0 = next(iter(pairs.values()))
        a = np.zeros((len(covered), a0.shape[0], max(ranks[site])), np.float32)
        b = np.zeros((len(covered), max(ranks[site]), b0.shape[1]), np.float32)
        for at, layer in enumerate(covered):
            if layer in pairs:
                r = ranks[site][at]
                factor = alpha if isinstance(alpha, (int, float)) else alpha[site, layer]
                a[at, :, :r] = pairs[layer][0]
                b[at, :r] = pairs[layer][1] * lora_scale(factor, r, rank_stabilised)
        tensors[f"{site}/A"], tensors[f"{site}/B"] = a, b
    return Delta("lora", {"sites": list(matrices), "layers": list(layers), "ranks": ranks}, tensors)


class Lora(Method):
    """Settings: ``sites``, ``layers``, ``ranks`` {site: [rank per layer]}. Tensors: ``site/A``, ``site/B``."""

    name = "lora"
    kind = "light"
    shares_layers = True
    step = "sums"
    usual: ClassVar[Mapping[str, Any]] = {"sites": ["query", "value"], "rank": 8}
    standard = True
    course = Course(rate=4e-3, takes=frozenset({"rank", "alpha", "sites", "layers"}), sizes=("rank",))

    @property
    def in_copies(self) -> bool:
        return True

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers, sites = covered_layers(settings, config), covered_sites(settings, config)
        specs: dict[str, TensorSpec] = {}
        for site in sites:
            covered = site_layers(site, layers)
            ranks = settings.get("ranks", {}).get(site)
            if (
                not isinstance(ranks, Sequence)
                or len(ranks) != len(covered)
                or not all(isinstance(r, int) and 0 <= r <= min(config.dims(site)) for r in ranks)
                or max(ranks) < 1
            ):
                raise InvalidTask(f"lora: ranks[{site!r}] must list {len(covered)} ranks, got {ranks!r}")
            inputs, outputs = config.dims(site)
            specs[f"{site}/A"] = TensorSpec((len(covered), inputs, max(ranks)))
            specs[f"{site}/B"] = TensorSpec((len(covered), max(ranks), outputs))
        return specs

    def check(self, delta: Delta, config: BackboneConfig) -> None:
        for site, ranks in delta.settings["ranks"].items():
            for at, rank in enumerate(ranks):
                if np.any(delta.tensors[f"{site}/A"][at, :, rank:]) and np.any(delta.tensors[f"{site}/B"][at, rank:]):
                    raise InvalidTask(f"lora: {site} must be zero past its rank {rank} in layer entry {at}")

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        rank, alpha = settings.get("rank", 8), settings.get("alpha")
        if type(rank) is not int or rank < 1:
            raise InvalidTask(f"lora: rank must be a whole number from 1 on, got {rank!r}")
        if alpha is not None and not (isinstance(alpha, (int, float)) and 0 < alpha <= MAX_ALPHA):
            raise InvalidTask(f"lora: alpha must be a number above 0 and at most {MAX_ALPHA:g}, got {alpha!r}"[:200])
        layers, sites = covered_layers(settings, config), covered_sites(settings, config)

        def pair(site: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            inputs, outputs = config.dims(site)
            return normal(rng, scale, (inputs, rank)), normal(rng, scale, (rank, outputs))

        matrices = {site: {layer: pair(site) for layer in site_layers(site, layers)} for site in sites}
        return lora_delta(matrices, alpha=float(rank if alpha is None else alpha))

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        """B starts at zero, A with the standard deviation that keeps a product's variance (Hu et al. 2021), times
        ``alpha / rank``: the scale is a part of the matrices, so that they only begin with it."""
        delta = self.init(rng, settings, config, INIT_SCALE)
        rank, alpha = settings.get("rank", 8), settings.get("alpha")
        scale = 1.0 if alpha is None else lora_scale(alpha, rank, False)
        tensors = {
            name: array * np.float32(scale / (INIT_SCALE * np.sqrt(array.shape[1])))
            if name.endswith("/A")
            else np.zeros_like(array)
            for name, array in delta.tensors.items()
        }
        return dataclasses.replace(delta, tensors=tensors)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        layers = covered_layers(delta.settings, config)
        sites = [site for site in covered_sites(delta.settings, config) if site != "pooler"]
        if not sites:
            return []
        key = ClassKey("lora", tuple((site, size_step(delta.tensors[f"{site}/A"].shape[-1])) for site in sites), layers)
        return [Contribution(key, {f"{s}/{n}": delta.tensors[f"{s}/{n}"] for s in sites for n in ("A", "B")})]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        specs: dict[str, ArraySpec] = {}
        for site, rank in key.sites:
            inputs, outputs = config.dims(site)
            specs[f"{site}/A"] = ArraySpec((len(key.layers), inputs, rank), split=1 if site in BY_INPUTS else None)
            specs[f"{site}/B"] = ArraySpec((len(key.layers), rank, outputs), split=2 if site in BY_OUTPUTS else None)
        return specs

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """Two thin products; x is read, y is read and written."""
        dims = {site: config.dims(site) for site, _ in key.sites}
        flops = sum(2 * tokens * rank * sum(dims[site]) for site, rank in key.sites)
        moved = sum(PARAM_BYTES * inputs + 2 * SUM_BYTES * outputs for inputs, outputs in dims.values())
        return Work(flops, tasks * layer_bytes(self.bank_arrays(key, config)) + tokens * moved)

    def addition(self, bound: Bound, place: Place, x: Float[Array, "t i"]) -> Float[Array, "g s p"] | None:
        view = bound.view
        assert isinstance(view, (RowView, SegmentView))
        at = bound.entry(place.layer)
        a, b = bound.bank[f"{place.site}/A"], bound.bank[f"{place.site}/B"]
        operator = functools.partial(low_rank, layer=at, candidate=bound.operators["low_rank"])
        return bound.launch(operator, view.segments(x), a, b, view.slots)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        products = {
            (layer, site): delta.tensors[f"{site}/A"][at] @ delta.tensors[f"{site}/B"][at]
            for at, layer, site in weight_places(delta.settings, config)
        }
        return map_kernels(params, config, lambda w, product: w + product, products)
