"""Where a class's rows stand in a macro-batch: static shapes, with the places as traced integers.

Rows of a macro-batch are ordered so that the rows of one class are neighbours. A light class then sees a short window
of the batch, at a place that changes from batch to batch without a new compilation:

``RowView``      rectangular bucket: ``R`` rows of ``L`` tokens from row ``first`` on; nothing is gathered.
``SegmentView``  packed bucket: ``G`` segments of at most ``S`` tokens, gathered from the window and gathered back.
``HeavyView``    heavy classes: runs of one task's tokens (``pallas_kernels.windows``).

A window may cover rows of other tasks. They hold slot 0 and keep their bits: results are selected, not added as zeros.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.numerics import take_rows
from pallas_kernels.windows import Runs, combine_runs, replace

Combine = Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowView:
    """``slots.shape[0]`` rows of ``length`` tokens each, starting at row ``first``."""

    first: Int[Array, ""]
    slots: Int[Array, " r"]
    length: int = dataclasses.field(metadata={"static": True})

    def segments(self, x: Float[Array, "t i"]) -> Float[Array, "r l i"]:
        window = jax.lax.dynamic_slice_in_dim(x, self.first * self.length, self.slots.shape[0] * self.length)
        return window.reshape(self.slots.shape[0], self.length, x.shape[-1])

    def add(self, y: Float[Array, "t o"], delta: Float[Array, "r l o"]) -> Float[Array, "t o"]:
        """``y`` with ``delta`` added at the window's own rows."""
        return self.combine(y, operator.add, delta)

    def replace(self, y: Float[Array, "t o"], values: Float[Array, "r l o"]) -> Float[Array, "t o"]:
        """``y`` with ``values`` at the window's own rows."""
        return self.combine(y, replace, values)

    def combine(self, y: Float[Array, "t o"], how: Combine, values: Float[Array, "r _ o"]) -> Float[Array, "t o"]:
        """``y`` with ``how(y, values)`` at the window's own rows; ``values`` one a token or one a row."""
        r, length, o = self.slots.shape[0], self.length, y.shape[1]
        own = jnp.broadcast_to((self.slots > 0)[:, None], (r, length)).reshape(-1, 1)
        flat = jnp.broadcast_to(values, (r, length, o)).reshape(-1, o)
        if r * length == y.shape[0]:  # the window is the batch: nothing to cut out, and it fuses with its surroundings
            return jnp.where(own, _combined(y, how, flat), y)
        at = self.first * self.length
        window = jax.lax.dynamic_slice_in_dim(y, at, r * length)
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(own, _combined(window, how, flat), window), at, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentView:
    """``tokens`` [G, S]: packed position of each cell (T = empty). ``cells`` [W]: for the W tokens from ``first`` on,
    their place in the flattened segments (past the end: not of this class)."""

    tokens: Int[Array, "g s"]
    slots: Int[Array, " g"]
    first: Int[Array, ""]
    cells: Int[Array, " w"]

    def segments(self, x: Float[Array, "t i"]) -> Float[Array, "g s i"]:
        return take_rows(x, self.tokens)

    def add(self, y: Float[Array, "t o"], delta: Float[Array, "g s o"]) -> Float[Array, "t o"]:
        """``y`` with ``delta`` added at the class's own tokens."""
        return self.combine(y, operator.add, delta)

    def replace(self, y: Float[Array, "t o"], values: Float[Array, "g s o"]) -> Float[Array, "t o"]:
        """``y`` with ``values`` at the class's own tokens."""
        return self.combine(y, replace, values)

    def combine(self, y: Float[Array, "t o"], how: Combine, values: Float[Array, "g _ o"]) -> Float[Array, "t o"]:
        """``y`` with ``how(y, values)`` at the class's own tokens; ``values`` one a cell or one a segment."""
        size = self.tokens.shape[1]
        each = size // values.shape[1]
        window = jax.lax.dynamic_slice_in_dim(y, self.first, self.cells.shape[0])
        own = self.cells < self.tokens.size
        result = _combined(window, how, take_rows(values.reshape(-1, y.shape[1]), self.cells // each))
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(own[:, None], result, window), self.first, 0)


def _combined(y: Float[Array, "t o"], how: Combine, values: Float[Array, "t o"]) -> Float[Array, "t o"]:
    """``how(y, values)`` in the format of the values, rounded to that of ``y``."""
    return how(y.astype(values.dtype), values).astype(y.dtype)


LightView = RowView | SegmentView


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeavyView:
    """Runs of at most ``size`` tokens: K cells of S = ``size`` tokens each, the first ones taken."""

    runs: Runs
    size: int = dataclasses.field(metadata={"static": True})

    def add(self, y: Float[Array, "t o"], delta: Float[Array, "k s o"]) -> Float[Array, "t o"]:
        """``y`` with ``delta`` added at the runs' tokens."""
        return combine_runs(y, operator.add, delta, self.runs)

    def replace(self, y: Float[Array, "t o"], values: Float[Array, "k s o"]) -> Float[Array, "t o"]:
        """``y`` with ``values`` at the runs' tokens."""
        return combine_runs(y, replace, values, self.runs)


TokenView = LightView | HeavyView
"""Of classes that act on tokens."""


class SlotView(NamedTuple):
    """Each row's slot, in row order, for parts that a row has once: biases, extra keys and values, a prompt."""

    slots: Int[Array, " n"]


class HeadView(NamedTuple):
    """The rows of which a head class reads the pooled vector (past the end: none), and their slots."""

    rows: Int[Array, " r"]
    slots: Int[Array, " r"]


ClassView = RowView | SegmentView | HeavyView | SlotView | HeadView
