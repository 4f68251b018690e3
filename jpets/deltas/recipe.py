"""How PET methods are trained: what a method's file says of it beside the serving side.

A ``Recipe`` turns any tree of f32 arrays into the parameters and deltas that one forward pass runs with, and in the end
into the deltas of a task file. Most methods need none of their own: their stored numbers are what is trained
(``Direct``), from where ``Method.start`` says. Others name the first ``Stage`` of their ``Course``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jpets.config import BackboneConfig
from jpets.deltas.merge import Params
from jpets.types import Delta

Tree = Any
FROZEN = "frozen"
"""Asked for in the place of a method: the head alone is trained."""
FULL = "full"
"""The same of every parameter of the backbone: the baseline, a backbone of its own."""
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
    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        """``key`` draws what is random in training; None: as served."""
        ...

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        """What is added to the loss."""
        ...

    def finish(self, tree: Tree) -> Sequence[Delta]: ...


class WithoutPenalty:
    """Recipes that add nothing to the loss."""

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        del tree
        return jnp.float32(0)


@dataclasses.dataclass(frozen=True)
class Direct(WithoutPenalty):
    """Deltas whose stored numbers are what is trained: new ones, or those of a task that was trained before; none where
    the head alone is trained.

    Tensors that hold no floating-point numbers stay as they are.
    """

    deltas: tuple[Delta, ...]
    """Where they start."""
    rate: float
    keeps_weights: bool

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        return [
            {name: jnp.asarray(delta.tensors[name], jnp.float32) for name in _floats(delta)} for delta in self.deltas
        ]

    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        del key
        return base, [_with(delta, own) for delta, own in zip(self.deltas, tree, strict=True)]

    def finish(self, tree: Tree) -> Sequence[Delta]:
        arrays = jax.tree.map(np.asarray, tree)
        return [_with(delta, own) for delta, own in zip(self.deltas, arrays, strict=True)]


def _floats(delta: Delta) -> list[str]:
    return [name for name, array in delta.tensors.items() if np.issubdtype(array.dtype, np.floating)]


def _with(delta: Delta, tensors: Mapping[str, Any]) -> Delta:
    return dataclasses.replace(delta, tensors={**delta.tensors, **tensors})


@dataclasses.dataclass(frozen=True)
class Full(WithoutPenalty):
    """Full fine-tuning, every parameter of the backbone: the baseline, and where some methods begin."""

    base: Params
    rate: float = 1e-4
    keeps_weights: ClassVar[bool] = False

    def start(self, rng: np.random.Generator) -> Tree:
        del rng
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), self.base)

    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        del base, key
        return tree, ()

    def finish(self, tree: Tree) -> Sequence[Delta]:
        """None: a backbone of its own, out of which deltas can be extracted."""
        del tree
        return ()


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a course is for: a backbone, the settings that were asked for, and the epochs of the whole."""

    config: BackboneConfig
    base: Params
    settings: Mapping[str, Any]
    epochs: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training of a course. ``then`` makes the next one of what it trained; the head goes on from the last."""

    recipe: Recipe
    epochs: int
    then: Callable[[Tree], Stage] | None = None


@dataclasses.dataclass(frozen=True)
class Course:
    """How a method is trained where nothing else is asked for (its paper's section on this)."""

    rate: float | None
    """Learning rate of the stored numbers; None: it stores none that could be trained on."""
    takes: frozenset[str] = frozenset()
    """Settings that may be asked for."""
    sizes: tuple[str, ...] = ()
    """Those of them that are sizes of arrays: whole numbers from 1 on."""
    settings: Mapping[str, Any] | None = None
    """None: those of a usual task."""
    first: Callable[[Lesson], Stage] | None = None
    """The first stage; None: the stored numbers are trained, from ``Method.start`` on."""
    again: Callable[[Lesson, Delta], Recipe] | None = None
    """How training goes on from a delta that is a task's only one, where ``rate`` is None."""
