"""What a policy takes and returns: waiting queries, and batches of them. Numpy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]
Bools = npt.NDArray[np.bool_]
Groups = tuple[tuple[int, int], ...]
BARE = -1
"""The task and the delta kind of a query to the plain backbone."""


@dataclasses.dataclass(frozen=True)
class Queue:
    """n waiting queries: their ``lengths`` in tokens, ``tasks`` (a number for each task) and delta ``kinds``.

    A kind is an index into the cost profile's kinds; all queries of a task have the task's kind.
    """

    lengths: Ints
    tasks: Ints
    kinds: Ints

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.tasks) == len(self.kinds):
            raise ValueError("lengths, tasks and kinds must have one entry for each query")
        if len(self.lengths) and self.lengths.min() < 1:
            raise ValueError("a query has at least one token")

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Ints,
        tasks: Sequence[int] | Ints | None = None,
        kinds: Sequence[int] | Ints | None = None,
    ) -> Queue:
        """Queries of the plain backbone unless ``tasks`` and ``kinds`` say otherwise."""
        n = len(lengths)
        bare = np.full(n, BARE)
        return cls(
            np.asarray(lengths, np.int_).reshape(n),
            bare if tasks is None else np.asarray(tasks, np.int_),
            bare if kinds is None else np.asarray(kinds, np.int_),
        )


@dataclasses.dataclass(frozen=True)
class Batch:
    """Queries (their numbers) that run together, in the static shape that they were costed in.

    ``tokens`` packed tokens and attention ``groups`` ((N, L), ...); padded batches have one group and T = N L.
    ``seconds`` is its predicted time, NaN where that is not known.
    """

    queries: Ints
    tokens: int
    groups: Groups
    seconds: float = np.nan

    @property
    def padded(self) -> bool:
        return len(self.groups) == 1 and self.tokens == self.groups[0][0] * self.groups[0][1]


Batches = list[Batch]
"""Batches that hold every query of a queue once."""
