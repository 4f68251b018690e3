"""How each PET method is trained: what its parameters are, what a forward pass makes of them, and what is kept.

A ``Recipe`` turns any tree of f32 arrays into the parameters and deltas that one forward pass runs with, and in the end
into the deltas of a task file. ``penalty`` is added to the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jpets.config import LINEAR_SITES, NORM_SITES, BackboneConfig
from jpets.deltas import METHODS
from jpets.deltas.adapter import adapter_placement
from jpets.errors import InvalidInput
from jpets.model.encoder import Params
from jpets.types import Delta

Tree = Any
INIT_SCALE = 0.02
"""Standard deviation of what starts at random, as BERT's own weights did."""


class Recipe(Protocol):
    """``start`` gives the trained tree; ``vary`` what it means, differentiably; ``finish`` the deltas to keep."""

    @property
    def rate(self) -> float:
        """Learning rate that suits it (AdamW, a hundred updates and more)."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether ``vary`` leaves the backbone's weights as they are, its biases apart."""
        ...

    def start(self, rng: np.random.Generator) -> Tree: ...
    def vary(self, base: Params, tree: Tree, key: Array | None) -> tuple[Params, Sequence[Delta]]:
        """``key`` draws what is random in training; None: as served."""
        ...

    def penalty(self, tree: Tree) -> Float[Array, ""]: ...
    def finish(self, tree: Tree) -> Sequence[Delta]: ...


class WithoutPenalty:
    """Recipes that add nothing to the loss."""

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        del tree
        return jnp.float32(0)


@dataclasses.dataclass(frozen=True)
class Direct(WithoutPenalty):
    """Deltas whose stored numbers are what is trained: adapter, LoRA, BitFit, IA3, prefix, prompt, a one-bit's scales,
    the values of a sparse difference that was trained before; none where the head alone is trained.

    Tensors that hold no floating-point numbers stay as they are.
    """

    deltas: tuple[Delta, ...]
    """Where they start."""
    rate: float

    @property
    def keeps_weights(self) -> bool:
        return all(METHODS[delta.method].kind != "heavy" for delta in self.deltas)

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        return [
            {name: jnp.asarray(delta.tensors[name], jnp.float32) for name in _floats(delta)} for delta in self.deltas
        ]

    def vary(self, base: Params, tree: Tree, key: Array | None) -> tuple[Params, Sequence[Delta]]:
        del key
        return base, [_with(delta, own) for delta, own in zip(self.deltas, tree, strict=True)]

    def finish(self, tree: Tree) -> Sequence[Delta]:
        arrays = jax.tree.map(np.asarray, tree)
        return [_with(delta, own) for delta, own in zip(self.deltas, arrays, strict=True)]


def _floats(delta: Delta) -> list[str]:
    return [name for name, array in delta.tensors.items() if np.issubdtype(array.dtype, np.floating)]


def _with(delta: Delta, tensors: Mapping[str, Any]) -> Delta:
    return dataclasses.replace(delta, tensors={**delta.tensors, **tensors})


def random_start(
    method: str, settings: Mapping[str, Any], config: BackboneConfig, rng: np.random.Generator, base: Params
) -> Delta:
    """A delta that changes nothing yet, or, of virtual tokens, little: where its paper starts it."""
    if method == "bitfit":
        METHODS[method].tensors(settings, config)  # which says what is wrong with the settings
        return _own_biases(settings, config, base)
    delta = METHODS[method].init(rng, settings, config, INIT_SCALE)
    tensors = dict(delta.tensors)
    for name, array in tensors.items():
        if name.endswith(("/up", "_bias", "/B")):
            tensors[name] = np.zeros_like(array)
        elif name.endswith("/scale"):
            tensors[name] = np.ones_like(array)
        elif name.endswith("/A"):  # of the size that keeps a product's variance (Hu et al. 2021)
            tensors[name] = array / np.float32(INIT_SCALE * np.sqrt(array.shape[1]))
        elif name.endswith("/prompt"):  # embeddings of words (Lester et al. 2021)
            chosen = rng.integers(0, config.vocab_size, array.shape[1])
            tensors[name] = np.asarray(base["word"])[chosen][None].astype(np.float32)
    return dataclasses.replace(delta, tensors=tensors)


def _own_biases(settings: Mapping[str, Any], config: BackboneConfig, base: Params) -> Delta:
    """BitFit starts from the backbone's biases; the pooler's only where asked for."""
    bias, layout = np.asarray(base["bias"], np.float32), config.bias_layout()
    sites = tuple(settings.get("sites", ("embeddings_norm", *LINEAR_SITES, *NORM_SITES)))
    layers = tuple(settings.get("layers", range(config.layers)))
    outside = ("embeddings_norm", "pooler")
    tensors = {
        f"{site}/bias": np.stack([bias[layout[at, site]] for at in ((0,) if site in outside else layers)])
        for site in sites
    }
    return Delta("bitfit", {"sites": list(sites), "layers": list(layers)}, tensors)


DIRECT: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "adapter": ({"bottleneck": 64}, 2e-3),
    "lora": ({"sites": ["query", "value"], "rank": 8}, 4e-3),
    "bitfit": ({}, 3e-3),
    "ia3": ({}, 1e-2),
    "prefix": ({"tokens": 16}, 1e-2),
    "prompt": ({"tokens": 16}, 3e-2),
}
"""Settings and learning rate of each, where nothing else is asked for (their papers' sections on this)."""
RATES: Mapping[str, float] = {**{method: rate for method, (_, rate) in DIRECT.items()}, "diff": 5e-3, "onebit": 1e-4}
"""Learning rate of the numbers of each method that has some: of a sparse difference once its places are known, of signs
their scales."""
SETTINGS: Mapping[str, frozenset[str]] = {
    "adapter": frozenset({"placement", "bottleneck", "sites", "layers", "activation", "input"}),
    "lora": frozenset({"rank", "alpha", "sites", "layers"}),
    "bitfit": frozenset({"sites", "layers"}),
    "ia3": frozenset({"sites", "layers"}),
    "prefix": frozenset({"tokens", "first_position", "layers"}),
    "prompt": frozenset({"tokens"}),
    "diff": frozenset({"density", "block", "price"}),
}
"""What may be asked of each method; the others take none."""


SIZES = ("rank", "bottleneck", "tokens", "block")


def check_settings(method: str, settings: Mapping[str, Any], config: BackboneConfig) -> None:
    """Raises ``InvalidInput`` for a setting that the method does not take, and for a size, a density or a price that is
    none, before arrays of that size are made."""
    known = SETTINGS.get(method, frozenset())
    if unknown := sorted(settings.keys() - known):
        takes = f"takes the settings {sorted(known)}" if known else "takes no settings"
        raise InvalidInput(f"{method} {takes}, found {unknown}")
    most = config.hidden_size
    for name in SIZES:
        value = settings.get(name, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidInput(
                f"{method}: {name} must be a whole number up to the hidden size, {most}, found {value!r}"
            )
    block, density = settings.get("block", 1), settings.get("density", 1.0)
    if any(size % block for site in LINEAR_SITES for size in config.dims(site)):
        raise InvalidInput(f"{method}: block must divide the sizes of all matrices, found {block}")
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise InvalidInput(f"{method}: density must be a share above 0 and up to 1, found {density!r}")
    price = settings.get("price", 0.0)
    if not isinstance(price, (int, float)) or not 0 <= price < math.inf:
        raise InvalidInput(f"{method}: price must be a number from 0 on, found {price!r}")


def direct_recipe(
    method: str, settings: Mapping[str, Any], config: BackboneConfig, base: Params, seed: int = 0
) -> Direct:
    """A new delta to train; none where the backbone is ``frozen``. Raises ``InvalidInput`` for settings that the method
    does not take."""
    check_settings(method, settings, config)
    if method == "frozen":
        return Direct((), 0.0)
    defaults, usual = DIRECT[method]
    full = {**defaults, **settings}
    try:
        if method == "adapter":
            full = {**adapter_placement(str(full.pop("placement", "houlsby")), config), **full}
        delta = random_start(method, full, config, np.random.default_rng(seed), base)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidInput(f"{method}: {str(error).removeprefix(f'{method}: ')}") from error
    return Direct((delta,), usual)


def check_continued(methods: Sequence[str], method: str, settings: Mapping[str, Any]) -> None:
    """Raises ``InvalidInput`` where training that goes on from a task of ``methods`` is asked for another one, or for
    settings."""
    if method not in methods:
        raise InvalidInput(f"method: training goes on from a task of {', '.join(methods)}, found {method}")
    if settings:
        raise InvalidInput(f"settings: those of the task that training goes on from stay, found {sorted(settings)}")


def continued(deltas: Sequence[Delta]) -> Direct:
    """Training that goes on from a task's deltas: places and signs stay as they are. Raises ``InvalidInput`` for a mask
    beside other methods."""
    if fixed := [delta.method for delta in deltas if delta.method not in RATES]:
        raise InvalidInput(f"training goes on from any of {sorted(RATES)} together, found {fixed} among them")
    return Direct(tuple(deltas), min(RATES[delta.method] for delta in deltas))


def tree_size(tree: Tree) -> int:
    """Numbers that are trained."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))
