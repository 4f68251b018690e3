"""Texts of a group's training, with what the teacher says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jpets.students.teacher import Lessons
from jpets.tokenizing import Tokens
from jpets.training.batches import filled_up, orders
from jpets.training.forward import TextRows
from jpets.training.plan import SettledPlan
from jpets.training.tokens import padded_length, rectangle


class StudentBatch(NamedTuple):
    """``vectors`` [n, t] and ``logits`` [n, c] of the teacher, ``before`` [n, d] of the students that are there;
    ``weights`` [n], 0 for a row that only fills the batch."""

    rows: TextRows
    vectors: Float[Array, "n t"]
    logits: Float[Array, "n c"]
    before: Float[Array, "n d"]
    weights: Float[Array, " n"]


@dataclasses.dataclass(frozen=True)
class Texts:
    """``before`` [n, d]: the sum of the students that are there, if there are some."""

    tokens: Sequence[Tokens]
    lessons: Lessons
    before: Float[np.ndarray, "n d"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, chosen: Integer[np.ndarray, " _"]) -> Texts:
        """Some of the texts."""
        return Texts([self.tokens[at] for at in chosen], self.lessons.take(chosen))

    def beside(self, before: Float[np.ndarray, "n d"]) -> Texts:
        """The same texts beside students whose sum is ``before``."""
        return dataclasses.replace(self, before=before)

    def batches(self, plan: SettledPlan, pad_id: int) -> Callable[[int, int], StudentBatch]:
        """A batch by epoch and place in it."""
        chosen_at = orders([len(own.ids) for own in self.tokens], plan)
        return lambda epoch, at: self._batch(chosen_at(epoch, at), plan.batch, pad_id)

    def mean(self, loss: Callable[[StudentBatch], float], size: int, pad_id: int) -> float:
        """The mean over all texts of a mean over a batch."""
        total = 0.0
        for first in range(0, len(self), size):
            chosen = np.arange(first, min(first + size, len(self)))
            total += loss(self._batch(chosen, size, pad_id)) * len(chosen)
        return total / max(1, len(self))

    def _batch(self, chosen: Integer[np.ndarray, " _"], size: int, pad_id: int) -> StudentBatch:
        filled = filled_up(chosen, size)
        own = [self.tokens[at] for at in filled]
        rows = rectangle(own, padded_length(max(len(each.ids) for each in own)), pad_id)
        before = np.zeros((size, 0), np.float32) if self.before is None else self.before[filled]
        weights = (np.arange(size) < len(chosen)).astype(np.float32)
        vectors, logits = self.lessons.vectors[filled], self.lessons.logits[filled]
        return StudentBatch(rows, *map(jnp.asarray, (vectors, logits, before, weights)))
