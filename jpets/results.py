"""Answers: what a query's head made of it, and where its time went."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jpets.errors import JpetsError
from jpets.fills import Masked
from jpets.spelling import Spelling

FloatArray = npt.NDArray[np.float32]
Tensors = Mapping[str, npt.NDArray[Any]]


CACHE = "cache"
"""What stands for the program of an answer that was not computed."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Where a query's time went, in seconds, and what ran it."""

    queued: float
    computed: float
    bucket: str
    program: str
    fallback: bool
    """True when a better-fitting program was still being compiled."""
    shared_layers: int = 0
    """Lower layers that were computed once for this text and all tasks that were asked about it together."""
    tokens: int = 0
    """Tokens that were computed: those of the text and the virtual ones of its task, by each student that was asked."""

    @property
    def cached(self) -> bool:
        """Whether an earlier answer to the same query was given again."""
        return self.program == CACHE

    @property
    def executable(self) -> str:
        """The former name of ``program``, kept for one release."""
        return self.program


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What every answer carries. ``error`` is set, and the numbers are empty, where that row failed."""

    task: str | None
    tokens: int
    timing: Timing | None = None
    error: JpetsError | None = None
    students: int | None = None
    """How many students of a group made the answer."""
    version: int | None = None
    """The version of the task that made it; None for the backbone, and for a task that was added without one."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Classification(Result):
    """Single label: softmax ``probs`` and the best label. Multi-label: sigmoid ``probs``, ``labels`` over threshold."""

    logits: FloatArray
    probs: FloatArray
    label: str | None
    score: float
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Label names in the order of ``logits``."""
    multi_label: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Regression(Result):
    logits: FloatArray
    """The predicted value or values, [outputs]."""
    score: float
    """The first value, or its sigmoid where it ``is_score``."""
    names: tuple[str, ...] = ()
    """Names of the values, where the task has some."""
    is_score: bool = False
    """Whether the only value stands for its sigmoid."""


@dataclasses.dataclass(frozen=True)
class Entity:
    """A run of tokens with one label. ``tokens`` are its first and last position, end exclusive.

    ``start`` and ``end`` (exclusive) are its characters in its text, the second one of a pair where ``in_pair`` is set,
    ``text`` what stands there, and ``word`` what its tokens spell, as ``transformers`` has it; None where the query
    came as token ids.
    """

    label: str
    score: float
    tokens: tuple[int, int]
    start: int | None = None
    end: int | None = None
    text: str | None = None
    word: str | None = None
    in_pair: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens(Result):
    """Per-token ``logits`` [tokens, labels], special tokens included, and the entities that the text's own tokens
    spell."""

    logits: FloatArray
    entities: tuple[Entity, ...] = ()
    """Neighbours of one label (the aggregation ``simple``)."""
    names: tuple[str, ...] = ()
    spelling: Spelling | None = None
    """Which tokens are of the query's texts, and where they stand there. The outputs of others mean nothing: the
    model's loss ignored them."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A piece of a context: its text, and where it stands there in characters, ``end`` exclusive."""

    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span(Result):
    """The most probable answer to a question: tokens ``start`` to ``end`` (exclusive) of the query.

    ``answer`` is its text; None where the query came as token ids.
    """

    logits: FloatArray
    """[tokens, 2], special tokens included: how well an answer begins at each token, and how well it ends with it."""
    start: int
    end: int
    score: float
    """Product of two probabilities: that the answer begins with the span's first token, and ends with its last."""
    answer: Answer | None = None


class Fill(NamedTuple):
    """A token in a mask's place: its id, what it spells, its probability, and the whole text with it."""

    token: int
    text: str
    score: float
    sequence: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fills(Result):
    """What stands in the places of a text's masks: ``jpets.engine.results.fills`` compares ``outputs`` [masks, e] of
    the head's layer with all tokens' vectors. ``tensors`` are the head's."""

    outputs: FloatArray
    masked: Masked
    tensors: Tensors


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Embedding(Result):
    embedding: FloatArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Result):
    """A row that could not be answered; ``error`` says why."""


class CombinedFuture(Future[Result]):
    """Of what several ``parts`` make, which may go on where it is cancelled."""

    def __init__(self, parts: Sequence[Future[Result]]) -> None:
        super().__init__()
        self.parts = parts
