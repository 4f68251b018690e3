"""What is compiled for a kind of model: one pure function, and the shapes of its arguments."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from jpets.config import BackboneConfig, DType
from jpets.deltas.protocol import ClassKey, Contribution
from jpets.deltas.view import ClassView
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.rows import TokenInput
from jpets.engine.programs.delta_order import Execution
from jpets.model.batch import PackedBatch
from jpets.types import Task

Params = dict[str, Any]
"""Nested dicts of arrays; the engine only hands them on."""
BankArrays = Mapping[str, Any]
State = Any
"""A pytree of arrays that one batch leaves for the next; () if it leaves nothing."""
Outputs = Any
"""A pytree of arrays, read by the workload of the same kind."""


class Link(NamedTuple):
    """One of the functions that ``Network.run`` is a chain of."""

    name: str
    """Links of one name are one compiled function."""
    classes: tuple[ClassKey, ...]
    """Those whose banks it reads; of links of one name they are the same."""
    moved: tuple[int, ...]
    """What the function has to know of the link."""
    layer: int | None = None


class Network(abc.ABC):
    """A kind of model as programs know it. Implementations are frozen dataclasses: equal ones make the same programs.

    An edit of an implementation's module, or of a module that it imports, makes every stored program of its kind stale.
    So the code that turns queries into rows, and outputs into results, is elsewhere: in its ``Workload``.

    It has more than 20 methods, as it is all that programs, costs and merged copies ask of a kind of model.
    """

    kind: ClassVar[str]
    """Its name among ``WORKLOADS``."""
    config: BackboneConfig
    """The sites where deltas act, and their sizes."""

    @property
    @abc.abstractmethod
    def inputs(self) -> Mapping[str, TokenInput]:
        """The inputs of each token, by name."""

    @property
    def split_axes(self) -> Mapping[str, Sequence[str | None]]:
        """Logical axes of the parameters that several devices may share (``MeshSlice``), by the last part of their
        names; each device has all other parameters whole. Each device then calls ``run`` with its parts (``arranged``)
        and adds up what ``jpets.deltas.parts`` says. Without any, devices share banks alone, as XLA sees fit."""
        return {}

    @property
    def mapped(self) -> Sequence[str]:
        """The parameters that are maps of files: a CPU reads them where they are, other devices get copies."""
        return ()

    def arranged(self, params: Params, devices: int) -> Params:
        """``cast``'s result, or some of it, with numbers in such an order that an even split gives each of so many
        devices what belongs together."""
        return params

    @abc.abstractmethod
    def cast(self, params: Params, dtype: DType) -> Params:
        """A backbone's parameters in the form of the device."""

    @abc.abstractmethod
    def abstract_params(self, dtype: DType) -> Params:
        """The shapes of ``cast``'s result."""

    def initial_state(self) -> State:
        """The state before the first batch. Programs donate it."""
        return ()

    @abc.abstractmethod
    def run(
        self,
        bucket: Bucket,
        variant: Variant,
        execution: Execution,
        params: Params,
        banks: Sequence[BankArrays],
        state: State,
        batch: PackedBatch,
        views: Sequence[ClassView],
    ) -> tuple[State, Outputs]:
        """The function that a program computes: ``banks`` and ``views`` in the order of the variant's classes."""

    @property
    def has_trunk(self) -> bool:
        """Whether rows of one text may share their lower layers (``run_above``)."""
        return False

    def run_above(
        self,
        layers: int,
        below: PackedBatch,
        bucket: Bucket,
        variant: Variant,
        execution: Execution,
        params: Params,
        banks: Sequence[BankArrays],
        batch: PackedBatch,
        views: Sequence[ClassView],
    ) -> Outputs:
        """``run`` for rows of one text: the first ``layers`` layers are computed once, for the batch ``below``, without
        any class. ``batch.ids`` are the places of the rows' tokens in it."""
        raise NotImplementedError

    def chain(self, variant: Variant) -> Sequence[Link]:
        """The functions that ``run`` is a chain of: each is compiled once, however often it stands in it. Without any,
        ``run`` is compiled as one function."""
        return ()

    def link_params(self, link: Link, params: Params) -> Params:
        """The parameters that a link reads, in a structure that all links of its name share."""
        raise NotImplementedError

    def run_link(
        self,
        link: Link,
        bucket: Bucket,
        variant: Variant,
        execution: Execution,
        params: Params,
        banks: Sequence[BankArrays],
        carried: Any,
        moved: Int[Array, " m"],
        batch: PackedBatch,
        views: Sequence[ClassView],
    ) -> Any:
        """What a link makes of the array that the link before gave, () for the first: an array, of the last one
        ``run``'s outputs. ``params`` are ``link_params``, ``banks`` and ``views`` those of ``link.classes``, and
        ``moved`` the traced ``link.moved`` of any link of the same name."""
        raise NotImplementedError

    @abc.abstractmethod
    def outputs(self, variant: Variant) -> Outputs:
        """The structure of ``run``'s outputs; its leaves may be anything."""

    @abc.abstractmethod
    def arithmetic(self, bucket: Bucket, variant: Variant, *, static_runs: bool = False) -> float:
        """Multiply-adds of a program: the unit of estimates before a program is measured. ``static_runs``: all runs of
        heavy classes that there is room for are computed (``Operators.static_runs``)."""

    @abc.abstractmethod
    def base_bias(self, params: Params) -> npt.NDArray[np.float32]:
        """All biases of the backbone as one array, laid out as ``config.bias_layout`` says, f32."""

    @abc.abstractmethod
    def lower(self, task: Task, params: Params) -> tuple[Task, Sequence[Contribution]]:
        """A task in the form that its queries need, and its contributions to banks. Raises ``InvalidTask``."""

    def classes(self, task: Task, params: Params) -> tuple[ClassKey, ...]:
        """The classes of a task's own deltas and head, each as small as it can be; of a group those of each student.
        Raises ``InvalidTask``."""
        return tuple(part.key for own in task.parts for part in self.lower(own, params)[1])

    @abc.abstractmethod
    def merge_target(self, params: Params) -> Params:
        """The parameters of which a merged copy has its own."""

    @abc.abstractmethod
    def merged(self, task: Task, params: Params, dtype: DType) -> Params:
        """``merge_target`` with those deltas of ``task`` folded in that copies hold (``Method.in_copies``), in the form
        of the device."""

    @abc.abstractmethod
    def shortened(self, layers: int) -> Self:
        """The same network with this many layers and few words, for measurements: every layer costs the same."""

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator, length: int) -> Mapping[str, npt.NDArray[Any]]:
        """The inputs of a row, for measurements."""
