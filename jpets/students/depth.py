"""Shallow backbones for students, and how many layers they need (Student Parallelism section B.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jpets.config import BackboneConfig
from jpets.errors import InvalidInput
from jpets.model.encoder import Params, split
from jpets.model.layers import some_layers
from jpets.tokenizing import Tokens
from jpets.training.forward import TextRows, states_of, within
from jpets.training.losses import state_distance
from jpets.training.plan import TrainingPlan
from jpets.training.pretrain import fit_texts
from jpets.training.run import Keeper, UpdateReport

RATE = 5e-4
"""Learning rate of distilling a backbone: most of its layers are gone, and the others must stand in for them."""
ENOUGH = 0.95
"""Share of the teacher's score that a depth has to reach."""


def deepest(layers: int) -> int:
    """Most layers of a student: a quarter of the teacher's, and two of a small one."""
    return max(2, layers // 4)


def is_enough(score: float, teacher: float, *, lower: bool = False, enough: float = ENOUGH) -> bool:
    """Whether a score reaches that share of the teacher's; ``lower``: of a measure of errors, as the rmse is."""
    return score * enough <= teacher if lower else score >= enough * teacher


def smallest_depth(reaches: Callable[[int], bool], most: int) -> int:
    """The smallest depth from 1 to ``most`` that ``reaches`` what it has to, by binary search: with more depth it does
    not get worse. ``most`` where none does. Each depth is asked about once."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle + 1
    return low


def spread_layers(whole: int, count: int) -> list[int]:
    """The layers that a shallow encoder begins with: evenly spread, the last one among them (TinyBERT section 3.1)."""
    return [-(-whole * (at + 1) // count) - 1 for at in range(count)]


def check_computes(config: BackboneConfig) -> None:
    """Raises ``InvalidInput`` for a backbone with tables."""
    if config.looks_up:
        raise InvalidInput("students take a backbone that computes all its layers; this one looks tokens up in tables")


def check_depths(configs: Sequence[BackboneConfig], *, stacked: bool) -> None:
    """Raises ``InvalidInput`` for backbones of one depth, among which the search cannot choose, and where students are
    to be ``stacked`` and none of the backbones has a middle layer."""
    depths = [config.layers for config in configs]
    if len(set(depths)) < len(depths):
        raise InvalidInput(f"backbones: expected each of another number of layers, found {sorted(depths)}")
    if stacked and max(depths) == 1:
        raise InvalidInput("stacking: students of one layer have no middle one that could imitate others; leave it out")


def shallow_config(config: BackboneConfig, layers: int) -> BackboneConfig:
    """Raises ``InvalidInput`` for a number of layers that is none of a part, and for a backbone with tables."""
    check_computes(config)
    if not 1 <= layers < config.layers:
        raise InvalidInput(f"layers: a shallow backbone has 1 to {config.layers - 1} of these layers, found {layers}")
    return dataclasses.replace(config, layers=layers, pooler=False)


def distilled(
    config: BackboneConfig,
    base: Params,
    layers: int,
    tokens: Sequence[Tokens],
    plan: TrainingPlan,
    *,
    keeper: Keeper | None = None,
    save_every: int = 100,
    pad_id: int = 0,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Params, list[float]]:
    """(parameters of an encoder of ``shallow_config``, losses): some of the backbone's layers, which learn the hidden
    states that the backbone gives of these texts (the pre-trained small model with which the first student begins).
    Word embeddings stay as they are."""
    shallow = shallow_config(config, layers)
    encoders = split(shallow), split(config)
    chosen = spread_layers(config.layers, layers)
    base = jax.tree.map(jnp.asarray, base)
    own = jax.tree.map(jnp.asarray, some_layers(base, config, shallow, chosen))
    word = own.pop("word")

    def objective(base: Any, own: Any, rows: TextRows, key: PRNGKeyArray) -> Float[Array, ""]:
        del key
        found = states_of(encoders[0], {**own["own"], "word": base["word"]}, rows, plan.dtype)
        expected = jax.lax.stop_gradient(states_of(encoders[1], base, rows, plan.dtype))
        inside = within(rows)
        apart = [state_distance(found[at + 1], expected[layer + 1], inside) for at, layer in enumerate(chosen)]
        return sum(apart, start=jnp.float32(0)) / len(apart)

    trained, losses = fit_texts(
        objective,
        base,
        {"own": own, "head": {}},
        tokens,
        plan,
        rate=RATE,
        keeper=keeper,
        save_every=save_every,
        pad_id=pad_id,
        report=report,
    )
    return {**jax.tree.map(np.asarray, trained["own"]), "word": np.asarray(word)}, losses
