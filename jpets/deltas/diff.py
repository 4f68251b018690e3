"""Diff-pruning: x W + x D with a sparse D, and sparse bias differences (Guo et al. 2020; PetS section 3.1).

D has single non-zeros or, if it was trained or extracted so (structured Diff-pruning), whole square blocks: then the
entries count blocks, and the value of an entry is a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jpets.config import LINEAR_SITES, BackboneConfig
from jpets.deltas.bitfit import BIAS_CLASS, bias_sites
from jpets.deltas.entries import (
    add_entries,
    block_norms,
    by_layer,
    check_entries,
    diff_delta,
    slot_lists,
    spread_blocks,
    value_shape,
)
from jpets.deltas.merge import Params, map_kernels, weights_of, with_weights
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
    normal,
    site_layers,
)
from jpets.deltas.recipe import Course, Lesson, Stage, Tree, WithoutPenalty
from jpets.deltas.view import HeavyView
from jpets.errors import InvalidInput, InvalidTask
from jpets.types import Delta
from pallas_kernels.sparse_matmul import BLOCKS, SPARSE, block_sparse_matmul, sparse_matmul, tiles_of


def count_step(count: int, block: int = 1) -> int:
    """Entries a layer, rounded up so that tasks of similar density share a class: a sixteenth of a power of two. A site
    without entries has room for some, as operators read arrays of at least one."""
    step = max(1, 64 // block**2, 2 ** max(0, count.bit_length() - 4))
    return max(1, -(-count // step)) * step


RATE = 5e-3
"""Learning rate of the values, once their places are known."""
SEARCH = 0.5
"""Share of the epochs that search the places of a sparse difference; the rest train its values."""
MAX_PRICE = 1e6
"""Of an open gate: what is beyond counts nothing but gates."""
STRETCH = 1.5
"""A hard-concrete gate is stretched to (-1.5, 1.5) before it is cut to (0, 1) (Guo et al. 2021, section 3.1)."""
FIRST_GATE = 5.0
"""Start value of gates' parameters: nearly all gates are open."""
GATE_STEPS = 1000.0
"""Factor of the gates' learning rate over the values' (0.1 beside 1e-4): gates' parameters are stored divided by it."""


@dataclasses.dataclass(frozen=True)
class DiffGates:
    """Diff-pruning's search (Guo et al. 2021): a difference w times a hard-concrete gate (Louizos et al. 2018) for each
    weight, or for each block of them, with a price on every gate that is probably open."""

    config: BackboneConfig
    base: Params
    density: float = 0.005
    block: int = 1
    price: float = 1.25e-7
    rate: float = 1e-4
    keeps_weights: ClassVar[bool] = False

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        layers = self.config.layers
        dims = {site: self.config.dims(site) for site in LINEAR_SITES}
        b = self.block
        return {
            "values": {site: jnp.zeros((layers, i, o)) for site, (i, o) in dims.items()},
            "gates": {
                site: jnp.full((layers, i // b, o // b), FIRST_GATE / GATE_STEPS) for site, (i, o) in dims.items()
            },
            "bias": jnp.zeros(self.config.bias_size()),
        }

    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        weights = weights_of(base, self.config)
        keys = [None] * len(weights) if key is None else list(jax.random.split(key, len(weights)))
        gates = {site: self._gate(tree["gates"][site], own) for site, own in zip(weights, keys, strict=True)}
        new = {site: w + tree["values"][site] * gates[site] for site, w in weights.items()}
        return with_weights({**base, "bias": base["bias"] + tree["bias"]}, self.config, new), ()

    def _gate(self, parameters: Float[Array, "l a b"], key: PRNGKeyArray | None) -> Float[Array, "l i o"]:
        alpha = parameters * GATE_STEPS
        if key is not None:
            u = jax.random.uniform(key, alpha.shape, minval=1e-6, maxval=1 - 1e-6)
            alpha = alpha + jnp.log(u) - jnp.log1p(-u)
        gate = jnp.clip(jax.nn.sigmoid(alpha) * 2 * STRETCH - STRETCH, 0, 1)
        return gate if self.block == 1 else jnp.repeat(jnp.repeat(gate, self.block, 1), self.block, 2)

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        """The expected number of open gates, priced; both ends of the stretch are equal in size, so its logarithm is
        0."""
        open_gates = sum(jax.nn.sigmoid(own * GATE_STEPS).sum() for own in tree["gates"].values())
        return jnp.float32(self.price * self.block**2) * open_gates

    def finish(self, tree: Tree) -> Sequence[Delta]:
        values = self.then(tree)
        return values.finish(values.start(np.random.default_rng(0)))

    def then(self, tree: Tree) -> DiffValues:
        """The search projected to the requested density: the largest of all differences, or of all blocks."""
        dense = {site: own * self._gate(tree["gates"][site], None) for site, own in tree["values"].items()}
        sizes = {site: block_norms(np.asarray(own), self.block) for site, own in dense.items()}
        every = np.concatenate([own.ravel() for own in sizes.values()])
        count = max(1, round(self.density * every.size))
        limit = np.partition(every, every.size - count)[every.size - count]
        chosen = {site: (own >= limit) & (own > 0) for site, own in sizes.items()}
        spread = {site: spread_blocks(own, self.block) for site, own in chosen.items()}
        first = {site: np.asarray(own) for site, own in dense.items()}
        return DiffValues(self.config, spread, first, np.asarray(tree["bias"]), self.block)


@dataclasses.dataclass(frozen=True)
class DiffValues(WithoutPenalty):
    """The values of a sparse difference with known places, and the differences of the biases."""

    config: BackboneConfig
    places: Mapping[str, Bool[np.ndarray, "l i o"]]
    first: Mapping[str, Float[np.ndarray, "l i o"]]
    first_bias: Float[np.ndarray, " b"]
    block: int = 1
    rate: float = RATE
    keeps_weights: ClassVar[bool] = False

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        values = {site: jnp.asarray(np.where(self.places[site], own, 0)) for site, own in self.first.items()}
        return {"values": values, "bias": jnp.asarray(self.first_bias)}

    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        del key
        weights = weights_of(base, self.config)
        new = {
            site: w + jnp.where(jnp.asarray(self.places[site]), tree["values"][site], 0) for site, w in weights.items()
        }
        return with_weights({**base, "bias": base["bias"] + tree["bias"]}, self.config, new), ()

    def finish(self, tree: Tree) -> Sequence[Delta]:
        values = tree["values"]
        dense = {site: np.where(self.places[site], np.asarray(own), np.float32(0)) for site, own in values.items()}
        biases: dict[str, dict[int, np.ndarray]] = {}
        for (layer, site), part in self.config.bias_layout().items():
            biases.setdefault(site, {})[layer] = np.asarray(tree["bias"])[part]
        weights = {site: dict(enumerate(own)) for site, own in dense.items()}
        return [diff_delta(weights, biases, range(self.config.layers), self.block)]


def _search_then_values(lesson: Lesson) -> Stage:
    search = DiffGates(lesson.config, lesson.base, **lesson.settings)
    first = max(1, round(SEARCH * lesson.epochs))

    def values(tree: Tree) -> Stage:
        return Stage(search.then(tree), max(1, lesson.epochs - first))

    return Stage(search, first, values)


class Diff(Method):
    """Settings: ``sites``, ``bias_sites``, ``layers``, ``block`` (1). Tensors of a weight: ``rows`` and ``cols`` [n],
    sorted by column, ``values`` [n], ``layer_offsets`` [layers + 1]; of a bias: ``bias_cols``, ``bias_values``,
    ``bias_offsets``. With blocks ``rows`` and ``cols`` count blocks, and ``values`` is [n, block, block]."""

    name = "diff"
    kind = "heavy"
    shares_layers = True
    step = "sums"
    usual: ClassVar[Mapping[str, Any]] = {"density": 0.005}
    standard = True
    course = Course(RATE, frozenset({"density", "block", "price"}), ("block",), first=_search_then_values)

    def _sites(self, settings: Mapping[str, Any], config: BackboneConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
        sites = covered_sites(settings, config) if settings.get("sites", True) else ()
        known = bias_sites(config)
        biased = settings.get("bias_sites", ())
        if set(biased) - set(known) or not (sites or biased):
            raise InvalidTask(f"diff: bias_sites must be some of {list(known)}, got {list(biased)}")
        return sites, tuple(site for site in known if site in biased)

    def _block(self, settings: Mapping[str, Any], config: BackboneConfig) -> int:
        block, sites = settings.get("block", 1), self._sites(settings, config)[0]
        if not isinstance(block, int) or block < 1 or any(size % block for s in sites for size in config.dims(s)):
            raise InvalidTask(f"diff: block must be a whole number that divides the sizes of its sites, got {block!r}")
        return block

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers = covered_layers(settings, config)
        sites, biased = self._sites(settings, config)
        shape = value_shape(self._block(settings, config))
        specs: dict[str, TensorSpec] = {}
        for site in sites:
            specs |= {f"{site}/{part}": TensorSpec((None,), "index") for part in ("rows", "cols")}
            specs[f"{site}/values"] = TensorSpec((None, *shape))
            specs[f"{site}/layer_offsets"] = TensorSpec((len(site_layers(site, layers)) + 1,), "index")
        for site in biased:
            specs[f"{site}/bias_cols"] = TensorSpec((None,), "index")
            specs[f"{site}/bias_values"] = TensorSpec((None,))
            specs[f"{site}/bias_offsets"] = TensorSpec((len(site_layers(site, layers)) + 1,), "index")
        return specs

    def check(self, delta: Delta, config: BackboneConfig) -> None:
        sites, biased = self._sites(delta.settings, config)
        layout, block = config.bias_layout(), self._block(delta.settings, config)
        for site in sites:
            inputs, outputs = (size // block for size in config.dims(site))
            check_entries(delta, site, ("rows", "cols", "values"), "layer_offsets", (inputs, outputs))
        for site in biased:
            part = layout[0, site]
            check_entries(delta, site, ("bias_cols", "bias_values"), "bias_offsets", (part.stop - part.start,))

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        """``density`` (0.005 by default) of every weight, in whole blocks if requested, and of every bias."""
        layers, density = covered_layers(settings, config), float(settings.get("density", 0.005))
        layout, block = config.bias_layout(), self._block(settings, config)
        sites = covered_sites(settings, config)

        def sparse(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
            side = block if len(shape) == 2 else 1
            chosen = np.zeros(int(np.prod(shape)) // side ** len(shape), bool)
            chosen[rng.choice(chosen.size, max(1, round(chosen.size * density)), replace=False)] = True
            chosen = chosen.reshape([size // side for size in shape])
            for axis in range(len(shape)):
                chosen = chosen.repeat(side, axis)
            dense = np.zeros(shape, np.float32)
            dense[chosen] = normal(rng, scale, (int(chosen.sum()),))
            return dense

        weights = {site: {layer: sparse(config.dims(site)) for layer in site_layers(site, layers)} for site in sites}
        biases = {site: {layer: sparse((config.dims(site)[1],)) for layer in weights[site]} for site in sites}
        assert all((layer, site) in layout for site in biases for layer in biases[site])
        return diff_delta(weights, biases, layers, block)

    def check_training(self, settings: Mapping[str, Any], config: BackboneConfig) -> None:
        super().check_training(settings, config)
        block, density = settings.get("block", 1), settings.get("density", 1.0)
        if any(size % block for site in LINEAR_SITES for size in config.dims(site)):
            raise InvalidInput(f"diff: block must divide the sizes of all matrices, found {block}")
        if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
            raise InvalidInput(f"diff: density must be a share above 0 and up to 1, found {density!r}")
        price = settings.get("price", 0.0)
        if not isinstance(price, (int, float)) or not 0 <= price <= MAX_PRICE:
            raise InvalidInput(f"diff: price must be a number from 0 to {MAX_PRICE:g}, found {price!r}"[:200])

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        layers, layout = covered_layers(delta.settings, config), config.bias_layout()
        sites, biased = self._sites(delta.settings, config)
        block = self._block(delta.settings, config)
        found: list[Contribution] = []
        sizes: list[tuple[str, int]] = []
        arrays: dict[str, npt.NDArray[Any]] = {}
        for site in sites:
            if site == "pooler":
                continue
            parts = list(by_layer(delta, site))
            size = count_step(max(len(rows) for rows, _, _ in parts), block)
            sizes.append((site, size))
            arrays |= slot_lists(site, parts, size, config.dims(site)[1] // block)
        if sizes:
            options = (("block", str(block)),) if block > 1 else ()
            found.append(Contribution(ClassKey("diff", tuple(sizes), layers, options), arrays))
        if biased:
            change = np.zeros(config.bias_size(), np.float32)
            for site in biased:
                offsets = delta.tensors[f"{site}/bias_offsets"]
                for at, layer in enumerate(site_layers(site, layers)):
                    part = slice(int(offsets[at]), int(offsets[at + 1]))
                    cols = layout[layer, site].start + delta.tensors[f"{site}/bias_cols"][part].astype(np.int64)
                    change[cols] = delta.tensors[f"{site}/bias_values"][part]
            found.append(Contribution(BIAS_CLASS, {"change": change}))
        return found

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        specs: dict[str, ArraySpec] = {}
        block = _block_of(key)
        for site, count in key.sites:
            shape = (len(key.layers), count)
            specs[f"{site}/rows"] = ArraySpec(shape, "uint16")
            specs[f"{site}/cols"] = ArraySpec(shape, "uint8")
            specs[f"{site}/ends"] = ArraySpec((len(key.layers), tiles_of(config.dims(site)[1] // block)), "int32")
            specs[f"{site}/values"] = ArraySpec((*shape, *value_shape(block)))
        return specs

    def typical(self, key: ClassKey, config: BackboneConfig) -> Contribution:
        """Non-zeros everywhere: unused entries would be dropped before the sum."""
        rng, block = np.random.default_rng(0), _block_of(key)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for site, count in key.sites:
            inputs, outputs = (size // block for size in config.dims(site))
            held = min(count, inputs * outputs)
            drawn = (np.sort(rng.choice(inputs * outputs, held, replace=False)) for _ in key.layers)
            values = normal(rng, 0.01, (len(key.layers), held, *value_shape(block)))
            parts = [(place % inputs, place // inputs, own) for place, own in zip(drawn, values, strict=True)]
            arrays |= slot_lists(site, parts, count, outputs)
        return Contribution(key, arrays)

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """One multiply-add for each non-zero and token; x is read, y is read and written."""
        flops = sum(2 * tokens * count * _block_of(key) ** 2 for _, count in key.sites)
        dims = [config.dims(site) for site, _ in key.sites]
        moved = sum(PARAM_BYTES * inputs + 2 * SUM_BYTES * outputs for inputs, outputs in dims)
        return Work(flops, tasks * layer_bytes(self.bank_arrays(key, config)) + tokens * moved)

    def addition(self, bound: Bound, place: Place, x: Float[Array, "t i"]) -> Float[Array, "k s p"] | None:
        blocks = _block_of(bound.key) > 1
        name, found = ("block_sparse_matmul", BLOCKS) if blocks else ("sparse_matmul", SPARSE)
        compute = found.get(bound.operators[name])
        if compute is None:
            return None
        return self._launch(functools.partial(compute, outputs=place.whole.outputs), bound, place, x)

    def total(self, bound: Bound, place: Place, x: Float[Array, "t i"], y: Float[Array, "t p"]) -> Float[Array, "t p"]:
        compute = block_sparse_matmul if _block_of(bound.key) > 1 else sparse_matmul
        return self._launch(compute, bound, place, x, y)

    def _launch(self, compute: Callable[..., Array], bound: Bound, place: Place, x: Array, *outputs: Array) -> Array:
        view, at = bound.view, bound.entry(place.layer)
        assert isinstance(view, HeavyView)
        lists = (bound.bank[f"{place.site}/{name}"] for name in ("rows", "cols", "ends", "values"))
        # Lists are whole on each of several devices: their entries are too unevenly spread to be shared.
        whole = spread(x, place.whole.inputs), *(spread(y, place.whole.outputs) for y in outputs)
        operator = functools.partial(compute, size=view.size, layer=at)
        return own_part(bound.launch(operator, *whole, *lists, view.runs), place.own.outputs)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        layers, layout = covered_layers(delta.settings, config), config.bias_layout()
        sites, biased = self._sites(delta.settings, config)
        entries = {
            (layer, site): part
            for site in sites
            for layer, part in zip(site_layers(site, layers), by_layer(delta, site), strict=True)
        }
        merged = map_kernels(params, config, add_entries, entries)
        bias = merged["bias"]
        for site in biased:
            offsets = delta.tensors[f"{site}/bias_offsets"]
            for at, layer in enumerate(site_layers(site, layers)):
                part = slice(int(offsets[at]), int(offsets[at + 1]))
                cols = layout[layer, site].start + np.asarray(delta.tensors[f"{site}/bias_cols"][part], np.int64)
                bias = bias.at[cols].add(jnp.asarray(delta.tensors[f"{site}/bias_values"][part], bias.dtype))
        return {**merged, "bias": bias}


def _block_of(key: ClassKey) -> int:
    return int(key.option("block")) if key.options else 1
