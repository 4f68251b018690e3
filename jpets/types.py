"""The plain data that passes between the parts: queries, results, deltas, heads, tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from jpets.access import DEFAULT_TENANT as DEFAULT_TENANT
from jpets.config import BackboneConfig
from jpets.kinds import Aggregation as Aggregation
from jpets.kinds import HeadType as HeadType
from jpets.kinds import Pooling as Pooling
from jpets.kinds import Problem as Problem
from jpets.kinds import Relevance as Relevance
from jpets.kinds import Side as Side
from jpets.kinds import TruncationStrategy as TruncationStrategy
from jpets.results import Answer as Answer
from jpets.results import Classification as Classification
from jpets.results import Embedding as Embedding
from jpets.results import Entity as Entity
from jpets.results import Failure as Failure
from jpets.results import Fill as Fill
from jpets.results import Fills as Fills
from jpets.results import FloatArray as FloatArray
from jpets.results import Regression as Regression
from jpets.results import Result as Result
from jpets.results import Span as Span
from jpets.results import Tensors as Tensors
from jpets.results import Timing as Timing
from jpets.results import Tokens as Tokens

UNLABELLED: Sequence[HeadType] = ("embedding", "question-answering", "fill-mask")
"""Heads without labels."""
HOST_TENSORS = ("norm_weight", "norm_bias", "decoder_bias")
"""Of a head: what is computed behind its layers, on the host."""
QA_OUTPUTS = 2
"""Of a question-answering head: start and end of the answer."""
Progress = Callable[[str, int, int], None]
"""Called with (what, done, of how many)."""


class TaskName(NamedTuple):
    """The name of a task: tenants may each have one of the same id."""

    tenant: str
    id: str

    @classmethod
    def of(cls, id: str, tenant: str = DEFAULT_TENANT) -> Self:
        return cls(tenant, id)


@dataclasses.dataclass(frozen=True)
class Query:
    """One text, pair of texts or sequence of token ids for one task; ``task=None`` asks the plain backbone.

    Token ids are taken as they are: they must hold the special tokens already. ``truncate`` overrides the task's
    own rule for texts that are too long; ``None`` keeps it, and a side cuts them there. For question answering ``text``
    is the question and ``text_pair`` the context. ``owner`` is the tenant that has the task, by default the one that
    asks. ``prompt`` names the one of the task's prompts that stands before the text. Of the query at most
    ``max_length`` tokens are taken, special ones included, and never more than the task takes.
    ``truncation_strategy`` overrides the task's own.
    """

    task: str | None
    text: str | None = None
    text_pair: str | None = None
    input_ids: Sequence[int] | None = None
    token_type_ids: Sequence[int] | None = None
    truncate: bool | Side | None = None
    owner: str | None = None
    prompt: str | None = None
    max_length: int | None = None
    truncation_strategy: TruncationStrategy | None = None

    def task_name(self, tenant: str) -> TaskName | None:
        """The task that it asks for, sent by ``tenant``."""
        return None if self.task is None else TaskName(self.owner or tenant, self.task)


@dataclasses.dataclass(frozen=True)
class BackboneRef:
    """Which backbone a task was trained on."""

    name: str
    fingerprint: str
    family: str
    hidden_size: int
    layers: int

    @classmethod
    def of(cls, backbone: LoadedBackbone) -> BackboneRef:
        """How task files name a backbone."""
        config = backbone.config
        return cls(backbone.name, backbone.fingerprint, config.family, config.hidden_size, config.layers)


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """One PET method's parameters for one task.

    ``settings`` are the method's hyper-parameters as in the task file, without ``method``; ``tensors`` maps
    ``site/name`` to an array whose leading axis runs over the layers covered. Compared by identity, as heads and tasks
    are: arrays have no one truth.
    """

    method: str
    settings: Mapping[str, Any]
    tensors: Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A task's head. Tensors: ``kernel`` [d, C], ``bias`` [C]; with two layers ``dense_kernel`` [d, m], ``dense_bias``.

    An embedding head gives the pooled vector itself, or what its layers make of it. A question-answering head has two
    outputs, start and end, and no labels. Behind a fill-mask head's layer are a norm (``norm_weight``, ``norm_bias``
    [C]), the products with the backbone's word embeddings, and ``decoder_bias`` [V].
    """

    type: HeadType
    tensors: Tensors = dataclasses.field(default_factory=dict)
    problem: Problem = "single-label"
    pooling: Pooling = "cls"
    activation: str = "tanh"
    """Activation after the first of two layers; of an embedding or fill-mask head with one layer, after that."""
    normalize: bool = False
    relevance: Relevance | None = None
    """What of the one output for a pair of texts such pairs are ranked by; None is the sigmoid."""

    @property
    def is_score(self) -> bool:
        """Whether the only output for a text is said to stand for its sigmoid."""
        return self.problem == "regression" and self.outputs == 1 and self.relevance == "sigmoid"

    @property
    def reads_tokens(self) -> bool:
        """Whether there are outputs for every token; ``pooling`` then means nothing."""
        return self.type in ("token-classification", "question-answering", "fill-mask")

    @property
    def activates_outputs(self) -> bool:
        """Whether ``activation`` follows the only layer."""
        return self.type in ("embedding", "fill-mask") and self.outputs > 0 and not self.dense

    @property
    def host_part(self) -> Tensors:
        """The tensors behind the layers, which no device has."""
        return {name: array for name, array in self.tensors.items() if name in HOST_TENSORS}

    @property
    def outputs(self) -> int:
        return int(self.tensors["kernel"].shape[-1]) if "kernel" in self.tensors else 0

    @property
    def dense(self) -> int:
        return int(self.tensors["dense_kernel"].shape[-1]) if "dense_kernel" in self.tensors else 0


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a task's texts become tokens. ``template`` holds ``{text}``, and ``{text_pair}`` where it takes pairs."""

    max_length: int | None = None
    truncation: bool = False
    template: str | None = None
    prefix: str | None = None
    thresholds: tuple[float, ...] | None = None
    prompts: Mapping[str, str] | None = None
    """By name, what may stand before a text instead of ``prefix``."""
    domain: str | None = None
    """Where the backbone looks tokens up in tables: the domain of these; None: the root's alone."""
    one_type: bool = False
    """All tokens of a pair have the token type 0, as the task has learnt."""
    truncation_strategy: TruncationStrategy = "longest_first"
    """Which text of a pair is cut. Where that is one of them, and it cannot lose enough, the pair is refused."""


@dataclasses.dataclass(frozen=True)
class EmbeddingRule:
    """How a backbone itself, without a task, makes an embedding of a text: the mean over the tokens, normalised, unless
    its checkpoint says something else."""

    pooling: Pooling = "mean"
    normalize: bool = True
    preprocessing: Preprocessing = Preprocessing()


BY_MEAN = EmbeddingRule()


@dataclasses.dataclass(frozen=True)
class Students:
    """That a task is a group of students: its deltas are those of the first student, then those of the second, and so
    on, each an encoder of its own; the head reads the sum of their pooled vectors by ``multipliers``.

    The first ones of them answer too, ``least`` or more, with less accuracy: of groups without pruning only all learnt
    to. ``scores`` are those of each number on held-out texts, by the measure ``metric``.
    """

    multipliers: tuple[float, ...]
    scores: tuple[float, ...] = ()
    metric: str | None = None
    teacher_score: float | None = None
    least: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a user registers: id, backbone, deltas, head and labels."""

    id: str
    backbone: BackboneRef
    deltas: tuple[Delta, ...]
    head: Head
    labels: tuple[str, ...] = ()
    preprocessing: Preprocessing = Preprocessing()
    created: str | None = None
    license: str | None = None
    description: str | None = None
    students: Students | None = None

    @property
    def vector_size(self) -> int:
        """The numbers of an embedding."""
        return self.head.outputs or self.backbone.hidden_size

    @property
    def parts(self) -> tuple[Task, ...]:
        """The students of a group, each as a task that gives its pooled vector; any other task alone."""
        if self.students is None:
            return (self,)
        count = len(self.students.multipliers)
        each = len(self.deltas) // count
        head = Head("embedding", pooling=self.head.pooling)
        rule = dataclasses.replace(self.preprocessing, thresholds=None)
        alone = dataclasses.replace(self, head=head, labels=(), preprocessing=rule, students=None)
        return tuple(dataclasses.replace(alone, deltas=self.deltas[at * each : (at + 1) * each]) for at in range(count))

    def outlined(self, *, host_part: bool = False) -> Task:
        """The task without the numbers of its deltas, and with a head of the same shape that takes no memory: it tells
        how answers look, and how long texts may be. With the head's ``host_part``, if that is said."""
        shapes: Tensors = {
            name: np.broadcast_to(np.float32(0), array.shape) for name, array in self.head.tensors.items()
        }
        if host_part:
            shapes = {**shapes, **self.head.host_part}
        deltas = tuple(dataclasses.replace(delta, tensors={}) for delta in self.deltas)
        return dataclasses.replace(self, deltas=deltas, head=dataclasses.replace(self.head, tensors=shapes))


class DomainReport(NamedTuple):
    """The table of a domain, or of the root, whose ``name`` is empty. ``levels`` are the tokens that were looked up for
    its texts, by where they were found: ``domain``, ``root``, or the root with fewer tokens of the n-gram."""

    name: str
    full_name: str
    entries: int
    bytes: int
    levels: Mapping[str, int]
    problem: str | None = None
    """Why the table cannot be used."""


class OpenTables(Protocol):
    """The tables of a domain, or the root alone, as they are at a moment. Thread-safe.

    The vectors of rows that it found stay where they are for as long as something refers to it.
    """

    @property
    def name(self) -> str:
        """Other tables, which find other vectors, have another name."""
        ...

    def rows(
        self, ids: npt.NDArray[np.int32], text_of_token: npt.NDArray[np.integer] | None = None
    ) -> npt.NDArray[np.int32]:
        """The row of each token of a text, or of several texts one after the other, whose numbers ``text_of_token`` [t]
        has; no token's n-gram reaches into another text. Many texts at once are far faster.

        Raises ``InvalidInput`` for unknown tokens, ``EngineFailure`` where a table is damaged.
        """
        ...

    def found(
        self, ids: npt.NDArray[np.int32], text_of_token: npt.NDArray[np.integer] | None = None
    ) -> tuple[npt.NDArray[np.int32], Callable[[], None]]:
        """(what ``rows`` gives, what counts these tokens): those that are looked up again count once."""
        ...


class RowSource(Protocol):
    """Tables of n-gram vectors of several domains, and of the root that they share, in memory. Thread-safe."""

    @property
    def moved(self) -> int:
        """How often rows came to mean other n-grams than before: what was copied of them may be wrong then."""
        ...

    def full_name(self, domain: str) -> str:
        """A domain's name with what tells its vectors from those of other ones that had its name. Raises
        ``NotFound``."""
        ...

    def opened(self, domain: str | None) -> OpenTables:
        """The tables of a domain, or the root's, as they are now. Raises ``NotFound`` for an unknown domain,
        ``EngineFailure`` where they cannot be used."""
        ...

    def check_writable(self) -> None:
        """Raises ``InvalidInput`` where domains can be neither added nor removed, as in a folder that is mounted to be
        read."""
        ...

    def report(self) -> Sequence[DomainReport]:
        """The root's first."""
        ...

    def add(self, domain: str, branch: Mapping[str, Any], *, same_layers: bool = False) -> None:
        """Adds a domain that was built beside the tables, or replaces one of its name; ``branch`` says what was built.
        Raises ``InvalidTable`` where it is not there or cannot be used, and with ``same_layers`` ``Conflict`` where the
        domain has other n-gram layers."""
        ...

    def remove(self, domain: str) -> None:
        """Removes a domain for good. Raises ``NotFound``, and what ``check_writable`` does."""
        ...


class LoadedBackbone(Protocol):
    """A backbone in host memory, as a checkpoint reader gives it: ``params`` is its network's nested dict of arrays,
    ``embeds`` says how it embeds texts by itself."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str:
        """Kind of model: the name of an engine's workload."""
        ...

    @property
    def config(self) -> BackboneConfig: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer_json(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def embeds(self) -> EmbeddingRule: ...
    @property
    def tables(self) -> RowSource | None:
        """Where tokens are looked up, if ``config.looks_up``."""
        ...
