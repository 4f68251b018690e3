"""One batch to run: which queries, how their rows are laid out, in which program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Row
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Resident


@dataclasses.dataclass(frozen=True)
class Plan:
    """``wanted`` is a program not yet compiled that would run the batch clearly cheaper, by ``missed`` seconds.

    ``layout`` is that of the rows in the program's bucket, ``below`` that of their text in the bucket of its trunk, if
    it has one. ``copy`` holds the weights to run on where the whole batch is one hot task's; the rows then lack the
    deltas that it holds. ``seconds`` is its predicted time.
    """

    pendings: Sequence[Pending]
    layout: Layout
    program: Program
    seconds: float
    wanted: ProgramKey | None = None
    missed: float = 0.0
    copy: Params | None = None
    saved: Mapping[Resident, float] = dataclasses.field(default_factory=dict)
    """Seconds that merged copies of these tasks save here, or would save if they had any."""
    below: Layout | None = None

    @property
    def rows(self) -> Sequence[Row]:
        return self.layout.rows

    @property
    def shared_layers(self) -> int:
        """Layers that are computed once for all rows."""
        trunk = self.program.key.trunk
        return 0 if trunk is None else trunk.layers


def row_on_copy(pending: Pending) -> Row:
    """A query's row for its task's merged weights."""
    assert pending.resident is not None
    return dataclasses.replace(pending.row, slots=pending.resident.copy_slots)
