"""The recipe of a training: the one in the method's file in ``jpets.deltas``, or one that continues a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas import METHODS, trainable
from jpets.deltas.protocol import NO_LEAD, Lead
from jpets.deltas.recipe import FROZEN, FULL, Course, Direct, Full, Lesson, Recipe, Stage, Tree
from jpets.errors import InvalidInput
from jpets.model.encoder import Params
from jpets.types import Delta

UPPER = "upper"


def method_names() -> Sequence[str]:
    """All names of methods for training: the methods of ``jpets.deltas`` and the baselines."""
    return (*trainable(), FROZEN, FULL)


def together_names() -> Sequence[str]:
    """The methods that can train several tasks together: their numbers are next to weights that all tasks share."""
    return (*(name for name, course in trainable().items() if course.first is None), FROZEN)


def rates() -> Mapping[str, float]:
    """Learning rate of each method that trains its stored numbers: for a sparse difference once its places are known,
    for signs the rate of their scales."""
    return {name: course.rate for name, course in trainable().items() if course.rate is not None}


def checked_settings(method: str, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, Any]:
    """``settings`` with the numbers of the layers that ``upper`` stands for, the upper half: tasks that act there alone
    share the layers below when they are asked about one text.

    Raises ``InvalidInput`` for an unknown method, a setting that it does not take, and for an invalid size, density
    or price, before arrays of that size are made.
    """
    if method not in (names := method_names()):
        raise InvalidInput(f"method must be one of {', '.join(names)}, found {method!r}")
    if method not in (FROZEN, FULL):
        METHODS[method].check_training(settings, config)
    elif settings:
        raise InvalidInput(f"{method} takes no settings, found {sorted(settings)}")
    elif method == FULL and config.looks_up:
        raise InvalidInput("full fine-tuning takes a backbone that computes all its layers; this one looks tokens up")
    if settings.get("layers") not in (UPPER, [UPPER]):
        return settings
    return {**settings, "layers": list(range(config.layers // 2, config.layers))}


def is_direct(method: str) -> bool:
    """Whether the method has a ``direct_recipe``."""
    return method in together_names()


def direct_recipe(
    method: str, settings: Mapping[str, Any], config: BackboneConfig, base: Params, seed: int = 0
) -> Direct:
    """A new delta to train; none if the backbone is ``frozen``. Raises ``InvalidInput`` for settings that the method
    does not take."""
    settings = checked_settings(method, settings, config)
    if method == FROZEN:
        return Direct((), 0.0, keeps_weights=True)
    course = _course(method)
    try:
        delta = METHODS[method].start(np.random.default_rng(seed), _with_usual(method, settings), config, base)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise InvalidInput(f"{method}: {str(error).removeprefix(f'{method}: ')}") from error
    assert course.rate is not None
    return _direct((delta,), course.rate)


def first_stage(
    method: str, settings: Mapping[str, Any], config: BackboneConfig, base: Params, epochs: int, seed: int
) -> Stage:
    """The first stage of a new task's training. Raises ``InvalidInput``."""
    if is_direct(method):
        return Stage(direct_recipe(method, settings, config, base, seed), epochs)
    settings = checked_settings(method, settings, config)
    if method == FULL:
        return Stage(Full(base), epochs)
    first = _course(method).first
    assert first is not None
    return first(Lesson(config, base, settings, epochs))


def check_continued(methods: Sequence[str], method: str, settings: Mapping[str, Any]) -> None:
    """Raises ``InvalidInput`` if training that continues a task of ``methods`` is to use another method, or has
    settings."""
    if method not in methods:
        raise InvalidInput(f"method: training goes on from a task of {', '.join(methods)}, found {method}")
    if settings:
        raise InvalidInput(f"settings: those of the task that training goes on from stay, found {sorted(settings)}")


def continued(deltas: Sequence[Delta], config: BackboneConfig, base: Params) -> Recipe:
    """Training that continues a task's deltas: places and signs stay as they are. Raises ``InvalidInput`` for a mask
    together with other methods."""
    known = rates()
    if len(deltas) == 1 and (course := METHODS[deltas[0].method].course) is not None and course.again is not None:
        return course.again(Lesson(config, base, {}, 0), deltas[0])
    if fixed := [delta.method for delta in deltas if delta.method not in known]:
        raise InvalidInput(f"training goes on from any of {sorted(known)} together, found {fixed} among them")
    return _direct(tuple(deltas), min(known[delta.method] for delta in deltas))


def lead_of(method: str, settings: Mapping[str, Any]) -> Lead:
    """The virtual tokens that a new delta sets before texts."""
    if method in (FROZEN, FULL):
        return NO_LEAD
    return METHODS[method].lead(Delta(method, _with_usual(method, settings), {}))


def _with_usual(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` over those of a usual training."""
    course = _course(method)
    return {**(METHODS[method].usual if course.settings is None else course.settings), **settings}


def _course(method: str) -> Course:
    course = METHODS[method].course
    assert course is not None
    return course


def _direct(deltas: tuple[Delta, ...], rate: float) -> Direct:
    return Direct(deltas, rate, keeps_weights=all(METHODS[delta.method].kind != "heavy" for delta in deltas))


def tree_size(tree: Tree) -> int:
    """How many numbers are trained."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))
