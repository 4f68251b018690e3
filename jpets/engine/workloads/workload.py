"""What an engine asks of a kind of model beside its programs: rows of queries, and results of outputs."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

from jpets.config import BackboneConfig
from jpets.engine.batch.rows import Row, TokenInput
from jpets.engine.batch.views import HeadPlace
from jpets.engine.programs.network import Network, Outputs
from jpets.engine.tasks.entries import Resident
from jpets.tokenizing import TextEncoder
from jpets.types import LoadedBackbone, Query, Result, Task, Timing

LETTERS = 4
"""Of a token, about."""


@dataclass(frozen=True)
class Place:
    """Where a query's numbers stand among the outputs: its row, its first token (the others follow it), and the cells
    of its head where it has one."""

    row: int
    first_token: int
    head: HeadPlace | None


@dataclass(frozen=True)
class Again:
    """A query that needs another step: it waits for a further batch, with this row."""

    row: Row


class Workload(abc.ABC):
    """One kind of model, served for one backbone. Thread-safe: rows are made in the threads that submit queries.

    ``longest`` is the most tokens of a query.
    """

    network: Network

    @classmethod
    @abc.abstractmethod
    def make_network(cls, config: BackboneConfig) -> Network:
        """What programs know of a backbone of this shape: also the process that compiles them has no more."""

    def __init__(self, backbone: LoadedBackbone, longest: int) -> None:
        self.backbone = backbone
        self.longest = longest
        self.text = TextEncoder.for_length(backbone, longest)

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        """The network's, with what empty places of a batch hold."""
        return self.network.inputs

    @abc.abstractmethod
    def row(self, query: Query, resident: Resident | None) -> Row:
        """A query as the device sees it. Raises what is wrong with the query."""

    def stand_in(self, query: Query) -> Row:
        """About as many tokens as a query will have; its own row takes its task to be known."""
        given, each = (query.text, LETTERS) if query.input_ids is None else (query.input_ids, 1)
        size = len(given) // each if isinstance(given, Sized) else 1
        return Row({}, {}, 0, length=min(max(1, size), self.longest))

    def gathered(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of a batch with what the host looks up for them, while the device computes the batch before."""
        return rows

    @abc.abstractmethod
    def result(self, task: Task | None, row: Row, outputs: Outputs, place: Place, timing: Timing) -> Result | Again:
        """A query's result, from the outputs of its batch in host memory."""
