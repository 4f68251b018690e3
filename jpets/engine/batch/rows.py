"""Queries as a device sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from jpets.deltas.protocol import NO_LEAD, ClassKey, Lead
from jpets.deltas.task_slots import task_slots
from jpets.fills import Masked
from jpets.passage import Passage
from jpets.spelling import Spelling
from jpets.types import OpenTables

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class TokenInput:
    """An input of each token of a batch, by name: an array of this shape, ``fill`` where there is no token."""

    dtype: npt.DTypeLike = np.int32
    shape: tuple[int, ...] = ()
    fill: float = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One query as the device sees it: its tokens, its task's slot in each class, its pooling.

    ``inputs`` holds an array [length, ...] for each ``TokenInput`` of the network. The first ``lead.tokens`` are the
    places of virtual tokens; positions begin at ``lead.first_position``. ``passage`` (of a question), ``spelling``
    (where tokens get labels) and ``masked`` (of a text with masks) are for the answer: they count from the text's first
    token.
    """

    inputs: Mapping[str, npt.NDArray[Any]]
    slots: Mapping[ClassKey, int]
    pooling: int
    length: int
    lead: Lead = NO_LEAD
    passage: Passage | None = None
    spelling: Spelling | None = None
    masked: Masked | None = None
    places: Ints | None = None
    """Positions [length] where they are not counted from ``lead.first_position``."""
    normalize: bool = True
    """Whether the embedding of a row without a task is normalised to length 1."""
    tables: OpenTables | None = None
    """Where the host looks its tokens up (``Workload.gathered``), if its backbone has tables."""

    @classmethod
    def of_tokens(cls, ids: Ints, types: Ints, slots: Mapping[ClassKey, int], pooling: int, **more: Any) -> Self:
        """A row of an encoder: ``ids`` and ``types`` [length]."""
        return cls({"ids": ids, "types": types}, slots, pooling, len(ids), **more)

    @property
    def ids(self) -> Ints:
        """The token ids of an encoder's row."""
        ids: Ints = self.inputs["ids"]
        return ids

    @property
    def positions(self) -> Ints:
        return self.lead.first_position + np.arange(self.length, dtype=np.int32) if self.places is None else self.places

    @property
    def text_tokens(self) -> int:
        return self.length - self.lead.tokens

    @property
    def heavy(self) -> bool:
        """Whether its task has heavy deltas, which need a pass of their own; asked anew for every plan."""
        return task_slots(self.slots).heavy


def led(row: Row, lead: Lead, inputs: Mapping[str, TokenInput]) -> Row:
    """``row`` with the places of its task's virtual tokens before the text's."""
    places = {name: np.full((lead.tokens, *own.shape), own.fill, own.dtype) for name, own in inputs.items()}
    whole = {name: np.concatenate([places[name], given]) for name, given in row.inputs.items()}
    return dataclasses.replace(row, inputs=whole, length=lead.tokens + row.length, lead=lead)
