"""What every policy asks of costs: which shapes there are, and what batches cost in them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal

from jpets.scheduling.costs.deltas import DeltaTables
from jpets.scheduling.queue import Batch, Batches, Bools, Floats, Ints, Queue


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one batch may hold. ``longest`` is the longest query in tokens."""

    rows: int
    tokens: int
    longest: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.longest < 1 or self.tokens < self.longest:
            raise ValueError(
                f"a batch must take at least one query of {self.longest} tokens, got {self.rows} rows and "
                f"{self.tokens} tokens"
            )


class BatchCosts(abc.ABC):
    """Costs of batches of a queue's queries. Shapes are an input of every policy: exact ones, which the papers assume
    (``Costs``), or those that can run now (``ReadyCosts``)."""

    limits: Limits
    deltas: DeltaTables
    mixtures: bool
    """Whether there are shapes for mixtures of lengths, which batches have to fill, and not for each batch its own."""

    def check(self, length: int) -> None:
        """Raises ``ValueError`` for a query that no shape holds."""
        if length > self.limits.longest:
            raise ValueError(f"a query of {length} tokens is longer than every shape holds ({self.limits.longest})")

    @property
    @abc.abstractmethod
    def alone(self) -> Bools:
        """Whether any n queries of up to l tokens fit one batch [rows + 1, longest + 1]."""

    @abc.abstractmethod
    def prefix(self, lengths: Ints) -> int:
        """How many queries, from the first on, one batch holds. Queries have at most ``limits.longest`` tokens."""

    @abc.abstractmethod
    def spans(self, queue: Queue, parts: Sequence[Ints], most: int) -> Floats:
        """The cost of the shared part (alpha) of neighbours of some parts as one batch [n, m]: entry (i, k) is parts
        i - k .. i, infinite where no shape holds them.

        Parts hold queries and ascend in their longest one, which is their last; a batch has at most ``most`` queries.
        """

    @abc.abstractmethod
    def batch(self, queue: Queue, queries: Ints) -> Batch:
        """These queries in the cheapest shape that holds them."""

    @abc.abstractmethod
    def whole(self, queue: Queue) -> Batch | None:
        """All queries as one batch, where looking for a better plan would take longer than any could save."""

    @abc.abstractmethod
    def pack(self, queue: Queue, order: Ints, aparts: Sequence[Ints]) -> list[Batches]:
        """Batches of neighbours in ``order`` [n], as full as pays: a plan for each of ``aparts`` [n], where no batch
        has queries of two values of it. Values stand in that order."""

    @abc.abstractmethod
    def total(self, queue: Queue, plan: Batches) -> float:
        """Predicted seconds of a plan (PetS equation 3)."""

    @abc.abstractmethod
    def further_policies(self, queue: Queue, seconds: float) -> Literal["all", "quick", "none"]:
        """Which policies it pays to try where ``packed`` is predicted to take ``seconds``: each with every batch size,
        those of one pass over the queue, or none."""
