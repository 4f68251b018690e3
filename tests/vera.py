"""VeRA (Kopiczko et al. 2024): y + (((x A) d) B) b, with random A and B that all tasks share.

A method that an installed package brings: this file and a row that names it are all that serving and training know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float

from jpets.config import BackboneConfig
from jpets.deltas.merge import Params, map_kernels
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
    normal,
    weight_places,
)
from jpets.deltas.recipe import Course
from jpets.deltas.view import RowView, SegmentView
from jpets.types import Delta
from pallas_kernels.numerics import dot, take_slots


def shared_pair(dims: tuple[int, int], rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(A [in, rank], B [rank, out]), the same for all tasks; those of a smaller rank are their first parts."""
    inputs, outputs = dims
    down = normal(np.random.default_rng(1), inputs**-0.5, (rank, inputs)).T
    return down, normal(np.random.default_rng(2), 1.0, (rank, outputs))


class Vera(Method):
    """Settings: ``sites``, ``layers``, ``rank``. Tensors: ``site/d`` [layers, rank], ``site/b`` [layers, out]."""

    name = "vera"
    kind = "light"
    step = "sums"
    shares_layers = True
    usual: ClassVar[Mapping[str, Any]] = {"sites": ["query", "value"], "rank": 32}
    course = Course(rate=2e-2, takes=frozenset({"sites", "layers", "rank"}), sizes=("rank",))

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers, rank = len(covered_layers(settings, config)), settings["rank"]
        return {
            f"{site}/{name}": TensorSpec((layers, size))
            for site in covered_sites(settings, config)
            for name, size in (("d", rank), ("b", config.dims(site)[1]))
        }

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        layers, rank = len(covered_layers(settings, config)), settings["rank"]
        tensors: dict[str, npt.NDArray[Any]] = {}
        for site in covered_sites(settings, config):
            tensors[f"{site}/d"] = np.full((layers, rank), 0.1, np.float32)
            tensors[f"{site}/b"] = normal(rng, scale, (layers, config.dims(site)[1]))
        return Delta("vera", settings, tensors)

    def start(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, base: Params
    ) -> Delta:
        return self.init(rng, settings, config, 0.0)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        sites = tuple((site, delta.settings["rank"]) for site in covered_sites(delta.settings, config))
        return [Contribution(ClassKey("vera", sites, covered_layers(delta.settings, config)), delta.tensors)]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        return {
            f"{site}/{name}": ArraySpec((len(key.layers), size))
            for site, rank in key.sites
            for name, size in (("d", rank), ("b", config.dims(site)[1]))
        }

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        flops = sum(2 * tokens * rank * sum(config.dims(site)) for site, rank in key.sites)
        width = sum(config.dims(site)[1] for site, _ in key.sites)
        return Work(flops, (tasks * PARAM_BYTES + tokens * 2 * SUM_BYTES) * width)

    def total(self, bound: Bound, place: Place, x: Float[Array, "t i"], y: Float[Array, "t o"]) -> Float[Array, "t o"]:
        view, at = bound.view, bound.entry(place.layer)
        assert isinstance(view, (RowView, SegmentView))
        d, b = (take_slots(bound.bank[f"{place.site}/{name}"], view.slots, at).astype(jnp.float32) for name in "db")
        down, up = shared_pair((x.shape[1], y.shape[1]), d.shape[1])
        thin = dot(view.segments(x), jnp.asarray(down, x.dtype)) * d[:, None]
        return view.add(y, dot(thin.astype(x.dtype), jnp.asarray(up, x.dtype)) * b[:, None])

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        parts = {}
        for at, layer, site in weight_places(delta.settings, config):
            down, up = shared_pair(config.dims(site), delta.settings["rank"])
            parts[layer, site] = (down * delta.tensors[f"{site}/d"][at]) @ (up * delta.tensors[f"{site}/b"][at])
        return map_kernels(params, config, lambda w, change: w + change.astype(w.dtype), parts)
