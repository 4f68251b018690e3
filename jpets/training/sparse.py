"""Training of methods that change the weights themselves: masks, sparse differences, signs, and all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jpets.config import LINEAR_SITES, BackboneConfig
from jpets.deltas.diff import block_norms, diff_delta, spread_blocks
from jpets.deltas.merge import kernel, map_kernels
from jpets.deltas.protocol import covered_layers, covered_sites
from jpets.errors import InvalidInput
from jpets.model.encoder import Params
from jpets.training.methods import RATES, Tree, WithoutPenalty
from jpets.types import Delta
from pallas_kernels.masked_matmul import pack_planes, signs

Stacked = Mapping[str, Float[Array, "l i o"]]
KEPT = 0.95
"""Share of each weight matrix that a mask keeps (PetS Table 4)."""
SAMPLE = 4096
"""Scores of a matrix from which its threshold is estimated, at every step anew."""
STRETCH = 1.5
"""A hard-concrete gate is stretched to (-1.5, 1.5) before it is cut to (0, 1) (Guo et al. 2021, section 3.1)."""
FIRST_GATE = 5.0
"""Where gates' parameters start: nearly all open."""
GATE_STEPS = 1000.0
"""Gates learn at so many times the rate of the values (0.1 beside 1e-4): their parameters are stored divided by it."""


def weights_of(base: Params, config: BackboneConfig) -> dict[str, Float[Array, "l i o"]]:
    """The layers' linear weights by site."""
    return {
        site: jnp.stack([jnp.asarray(kernel(base, config, at, site), jnp.float32) for at in range(config.layers)])
        for site in LINEAR_SITES
    }


def changed(base: Params, config: BackboneConfig, new: Stacked) -> Params:
    """``base`` with other weights at the layers' linear sites."""
    places = {(at, site): own[at] for site, own in new.items() for at in range(config.layers)}
    return map_kernels(base, config, lambda w, own: own.astype(w.dtype), places)


@dataclasses.dataclass(frozen=True)
class Full(WithoutPenalty):
    """Full fine-tuning, the baseline: every parameter of the backbone."""

    base: Params
    rate: float = 1e-4
    keeps_weights: ClassVar[bool] = False

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), self.base)

    def vary(self, base: Params, tree: Tree, key: Array | None) -> tuple[Params, Sequence[Delta]]:
        del base, key
        return tree, ()

    def finish(self, tree: Tree) -> Sequence[Delta]:
        """None: a backbone of its own, out of which deltas can be extracted."""
        del tree
        return ()


@dataclasses.dataclass(frozen=True)
class MaskScores(WithoutPenalty):
    """MaskBert (Zhao et al. 2020): a score a weight; the highest 95 % of each matrix are kept, and the gradient of a
    score is taken as if the mask were the score (straight-through, Bengio et al. 2013)."""

    base: Params
    config: BackboneConfig
    earlier: Delta | None = None
    """A mask to go on from. Raises ``InvalidInput`` where it is of some matrices alone."""
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
        """The weights' relative magnitudes: at first the smallest weights, which matter least, are off. Of an earlier
        mask those that it has off, which get the negative."""
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

    def vary(self, base: Params, tree: Tree, key: Array | None) -> tuple[Params, Sequence[Delta]]:
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


@dataclasses.dataclass(frozen=True)
class DiffGates:
    """Diff-pruning's search (Guo et al. 2021): a difference w times a hard-concrete gate (Louizos et al. 2018) for each
    weight, or for each block of them, with a price on every gate that is likely open."""

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

    def vary(self, base: Params, tree: Tree, key: Array | None) -> tuple[Params, Sequence[Delta]]:
        weights = weights_of(base, self.config)
        keys = [None] * len(weights) if key is None else list(jax.random.split(key, len(weights)))
        gates = {site: self._gate(tree["gates"][site], own) for site, own in zip(weights, keys, strict=True)}
        new = {site: w + tree["values"][site] * gates[site] for site, w in weights.items()}
        return changed({**base, "bias": base["bias"] + tree["bias"]}, self.config, new), ()

    def _gate(self, parameters: Float[Array, "l a b"], key: Array | None) -> Float[Array, "l i o"]:
        alpha = parameters * GATE_STEPS
        if key is not None:
            u = jax.random.uniform(key, alpha.shape, minval=1e-6, maxval=1 - 1e-6)
            alpha = alpha + jnp.log(u) - jnp.log1p(-u)
        gate = jnp.clip(jax.nn.sigmoid(alpha) * 2 * STRETCH - STRETCH, 0, 1)
        return gate if self.block == 1 else jnp.repeat(jnp.repeat(gate, self.block, 1), self.block, 2)

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        """The expected number of open gates, priced; both ends of the stretch are alike, so its logarithm is 0."""
        open_gates = sum(jax.nn.sigmoid(own * GATE_STEPS).sum() for own in tree["gates"].values())
        return jnp.float32(self.price * self.block**2) * open_gates

    def finish(self, tree: Tree) -> Sequence[Delta]:
        values = self.then(tree)
        return values.finish(values.start(np.random.default_rng(0)))

    def then(self, tree: Tree) -> DiffValues:
        """The search projected to the density that was asked for: the largest differences of all, or blocks of them."""
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
    """The values of a sparse difference whose places are known, and the differences of the biases."""

    config: BackboneConfig
    places: Mapping[str, np.ndarray]
    first: Mapping[str, np.ndarray]
    first_bias: np.ndarray
    block: int = 1
    rate: float = RATES["diff"]
    keeps_weights: ClassVar[bool] = False

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        values = {site: jnp.asarray(np.where(self.places[site], own, 0)) for site, own in self.first.items()}
        return {"values": values, "bias": jnp.asarray(self.first_bias)}

    def vary(self, base: Params, tree: Tree, key: Array | None) -> tuple[Params, Sequence[Delta]]:
        del key
        weights = weights_of(base, self.config)
        new = {
            site: w + jnp.where(jnp.asarray(self.places[site]), tree["values"][site], 0) for site, w in weights.items()
        }
        return changed({**base, "bias": base["bias"] + tree["bias"]}, self.config, new), ()

    def finish(self, tree: Tree) -> Sequence[Delta]:
        values = tree["values"]
        dense = {site: np.where(self.places[site], np.asarray(own), np.float32(0)) for site, own in values.items()}
        biases: dict[str, dict[int, np.ndarray]] = {}
        for (layer, site), part in self.config.bias_layout().items():
            biases.setdefault(site, {})[layer] = np.asarray(tree["bias"])[part]
        weights = {site: dict(enumerate(own)) for site, own in dense.items()}
        return [diff_delta(weights, biases, range(self.config.layers), self.block)]
