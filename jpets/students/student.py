"""One student: a shallow encoder with parameters of its own, and the vectors that it gives of texts.

Axes: n texts of up to L tokens, d hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jpets.deltas.recipe import Recipe, Tree
from jpets.model.encoder import Params, SplitEncoder
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.fit import as_served
from jpets.training.forward import TextRows, pooled_states
from jpets.training.plan import TrainingPlan
from jpets.training.tokens import by_length
from jpets.types import Pooling

BATCH = 64


@dataclasses.dataclass(frozen=True)
class Student:
    """What all students of a group have in common: the shallow backbone, and the ``recipe`` that makes one student of
    it, by a delta or by all its parameters."""

    encoder: SplitEncoder
    base: Params
    recipe: Recipe
    text: TextEncoder
    pooling: Pooling = "mean"

    @property
    def middle(self) -> int:
        """The layer that imitates the students before: the ceil(N / 2)th of N (section 3.1)."""
        return -(-self.encoder.config.layers // 2)

    @property
    def stacks(self) -> bool:
        """Whether the middle layer is another one than the last."""
        return self.middle < self.encoder.config.layers

    def served(self, plan: TrainingPlan) -> Params:
        """The backbone's parameters, on the device."""
        return as_served(self.base, self.recipe, plan)

    def vectors(
        self, base: Params, tree: Tree, rows: TextRows, key: PRNGKeyArray | None, dtype: str
    ) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
        """(final, middle) pooled vectors, f32; differentiable in ``tree``."""
        params, deltas = self.recipe.vary(base, tree, key)
        states = pooled_states(self.encoder, params, deltas, self.pooling, rows, dtype)
        return states[-1], states[self.middle]

    def of_texts(self, trees: Sequence[Tree], tokens: Sequence[Tokens]) -> Float[np.ndarray, "m n d"]:
        """The final vectors that each of some students gives of texts."""
        found = np.zeros((len(trees), len(tokens), self.encoder.config.hidden_size), np.float32)
        for numbers, rows in by_length(tokens, BATCH, self.text):
            for at, tree in enumerate(trees):
                found[at, numbers] = np.asarray(self._final(self._on_device, tree, rows))[: len(numbers)]
        return found

    @functools.cached_property
    def _on_device(self) -> Params:
        return jax.tree.map(jnp.asarray, dict(self.base))

    @functools.cached_property
    def _final(self) -> Callable[[Params, Tree, TextRows], Float[Array, "n d"]]:
        """Compiled once for all students."""
        return jax.jit(lambda base, tree, rows: self.vectors(base, tree, rows, None, "float32")[0])


def prefix_sums(
    vectors: Float[Array | np.ndarray, "m n d"], multipliers: Float[Array | np.ndarray, " m"]
) -> Float[Array, "m n d"]:
    """The representations by the first 1, 2, ... m students (equation 1): B(k) = sum of a(j) S(j) over j <= k."""
    return jnp.cumsum(jnp.asarray(vectors) * jnp.asarray(multipliers)[:, None, None], 0)
