"""What an engine asks of a kind of model besides its programs: rows of queries, and results of outputs."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from jpets.config import BackboneConfig
from jpets.engine.batch.rows import Row, TokenInput
from jpets.engine.batch.views import HeadPlace
from jpets.engine.programs.network import Network, Outputs
from jpets.engine.tasks.entries import Resident
from jpets.engine.workloads.row_cache import RowCache, WriteRows
from jpets.errors import JpetsError
from jpets.tokenizing import TextEncoder
from jpets.types import LoadedBackbone, Query, Result, Task, Timing

LETTERS = 4
"""Characters of a token, about."""


@dataclass(frozen=True)
class Place:
    """The place of a query's numbers among the outputs: its row, its first token (the others follow), and the cells of
    its head if it has one."""

    row: int
    first_token: int
    head: HeadPlace | None


@dataclass(frozen=True)
class Again:
    """A query that needs another step: it waits for a further batch, with this row."""

    row: Row


class RowFailures(Exception):
    """Rows of a batch cannot be computed, by their numbers there, and why. The others can, without them."""

    def __init__(self, errors: Mapping[int, JpetsError]) -> None:
        super().__init__(f"{len(errors)} rows of a batch cannot be computed")
        self.errors = errors


class Workload(abc.ABC):
    """One kind of model, served for one backbone. Thread-safe: rows are made in the threads that submit queries.

    ``longest`` is the most tokens of a query. ``staged_rows``: programs do not have the backbone's tables, if it has
    some, but so many rows of them; 0: they have the tables.
    """

    network: Network
    row_cache: RowCache | None = None
    """Of staged rows, once ``attach`` was called."""

    @classmethod
    @abc.abstractmethod
    def make_network(cls, config: BackboneConfig) -> Network:
        """What programs know of a backbone of this shape; the process that compiles them knows no more."""

    def __init__(self, backbone: LoadedBackbone, longest: int, *, staged_rows: int = 0) -> None:
        self.backbone = backbone
        self.staged_rows = staged_rows
        self.longest = longest
        self.text = TextEncoder.for_length(backbone, longest, looked_up=False)

    @property
    def params(self) -> Mapping[str, Any]:
        """The backbone's parameters, as a device gets them at first."""
        return self.backbone.params

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        """The network's inputs, with the values of empty places of a batch."""
        return self.network.inputs

    def attach(self, write: WriteRows) -> None:
        """Tells how staged rows come to the device."""
        return

    @abc.abstractmethod
    def row(self, query: Query, resident: Resident | None) -> Row:
        """A query as the device sees it. Raises what is wrong with the query."""

    def stand_in(self, query: Query) -> Row:
        """A row of about as many tokens as the query will have; the query's own row needs its task."""
        given, each = (query.text, LETTERS) if query.input_ids is None else (query.input_ids, 1)
        size = len(given) // each if isinstance(given, Sized) else 1
        return Row({}, {}, 0, length=min(max(1, size), self.longest))

    def gathered(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of a batch with the inputs that the host looks up for them, all at once, while the device computes
        the batch before. What it puts on the device is there when the batch runs, if that is the next one. Raises
        ``RowFailures``."""
        return rows

    @abc.abstractmethod
    def result(self, task: Task | None, row: Row, outputs: Outputs, place: Place, timing: Timing) -> Result | Again:
        """A query's result, from the outputs of its batch in host memory."""
