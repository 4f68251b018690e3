"""How PET methods are trained: the training side of a method's file.

A ``Recipe`` turns any tree of f32 arrays into the parameters and deltas of one forward pass, and in the end into the
deltas of a task file. Most methods need no recipe of their own: their stored numbers are trained (``Direct``), starting
from ``Method.start``. Others name the first ``Stage`` of their ``Course``.
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
"""In place of a method's name: only the head is trained."""
FULL = "full"
"""In place of a method's name: every parameter of the backbone is trained. The baseline, a backbone of its own."""
INIT_SCALE = 0.02
"""Standard deviation of random starts, the same as of BERT's own weights."""


class Recipe(Protocol):
    """``start`` gives the tree to train; ``vary`` its parameters and deltas, differentiably; ``finish`` the final
    deltas."""

    @property
    def rate(self) -> float:
        """A suitable learning rate (AdamW, a hundred updates and more)."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether ``vary`` leaves the backbone's weights as they are, except for its biases."""
        ...

    def start(self, rng: np.random.Generator) -> Tree: ...
    def vary(self, base: Params, tree: Tree, key: PRNGKeyArray | None) -> tuple[Params, Sequence[Delta]]:
        """``key`` is for random numbers in training; None: as served."""
        ...

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        """The term that is added to the loss."""
        ...

    def finish(self, tree: Tree) -> Sequence[Delta]: ...


class WithoutPenalty:
    """Recipes that add nothing to the loss."""

    def penalty(self, tree: Tree) -> Float[Array, ""]:
        del tree
        return jnp.float32(0)


@dataclasses.dataclass(frozen=True)
class Direct(WithoutPenalty):
    """Trains the stored numbers of deltas: of new ones, or of a task that was trained before; without deltas, only the
    head is trained.

    Tensors without floating-point numbers stay as they are.
    """

    deltas: tuple[Delta, ...]
    """The deltas at the start."""
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
    """Those that are trained. An empty list of differences, which no checkpoint could hold, stays as it is."""
    return [name for name, array in delta.tensors.items() if array.size and np.issubdtype(array.dtype, np.floating)]


def _with(delta: Delta, tensors: Mapping[str, Any]) -> Delta:
    return dataclasses.replace(delta, tensors={**delta.tensors, **tensors})


@dataclasses.dataclass(frozen=True)
class Full(WithoutPenalty):
    """Full fine-tuning, every parameter of the backbone: the baseline, and the first stage of some methods."""

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
    """The input of a course: a backbone, the requested settings, and the epochs of all stages."""

    config: BackboneConfig
    base: Params
    settings: Mapping[str, Any]
    epochs: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training of a course. ``then`` makes the next stage from the trained tree; the head continues from the
    last."""

    recipe: Recipe
    epochs: int
    then: Callable[[Tree], Stage] | None = None


@dataclasses.dataclass(frozen=True)
class Course:
    """How a method is trained by default (from its paper's section on training)."""

    rate: float | None
    """Learning rate of the stored numbers; None: it stores no numbers that could be trained further."""
    takes: frozenset[str] = frozenset()
    """Settings that may be given."""
    sizes: tuple[str, ...] = ()
    """The settings that are sizes of arrays: whole numbers from 1 on."""
    settings: Mapping[str, Any] | None = None
    """None: those of a usual task."""
    first: Callable[[Lesson], Stage] | None = None
    """The first stage; None: the stored numbers are trained, from ``Method.start`` on."""
    again: Callable[[Lesson, Delta], Recipe] | None = None
    """How training continues from a task's only delta, if ``rate`` is None."""
