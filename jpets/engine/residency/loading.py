"""From a task to its contributions to banks and to what its queries need. Host memory only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jpets.deltas import first_layer, task_lead
from jpets.deltas.bank import SlotArrays, slot_arrays
from jpets.deltas.protocol import LEAST_ROOM, ClassKey, Lead
from jpets.engine.programs.program import Family
from jpets.engine.results.results import check_answers
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.lowered import LoweredTask
from jpets.engine.tasks.table import TaskTable
from jpets.errors import InvalidTask, NotFound
from jpets.types import LoadedBackbone, Pooling, Task

OVERHEAD = 4096
"""Bytes of a loaded task besides its arrays, about."""


@dataclasses.dataclass(frozen=True)
class LoadedTask:
    """A task in the form of the banks, in host memory or, on its way to another device, on a device."""

    task: Task
    contents: Mapping[ClassKey, SlotArrays]
    pooling: Pooling
    longest: int
    lead: Lead
    first_layer: int

    @property
    def nbytes(self) -> int:
        parts = (*self.contents.values(), self.task.head.host_part)
        return OVERHEAD + sum(array.nbytes for arrays in parts for array in arrays.values())

    def resident(
        self, tenant: str, slots: Mapping[ClassKey, int], version: int | None, entry: Entry | None = None
    ) -> Resident:
        return Resident(
            tenant,
            self.task,
            slots,
            self.pooling,
            self.longest,
            self.lead,
            version,
            entry=entry,
            first_layer=self.first_layer,
        )

    def outlined(self) -> LoadedTask:
        """Without the numbers that queries do not need."""
        return dataclasses.replace(self, task=self.task.outlined(host_part=True))


class TaskLoader:
    """Checks tasks against a backbone and lowers them. ``longest`` is the engine's longest query in tokens."""

    def __init__(self, backbone: LoadedBackbone, family: Family, longest: int) -> None:
        self._backbone = backbone
        self._family = family
        self._longest = longest
        self._params = dict(backbone.params)
        self._base_bias = family.network.base_bias(self._params)

    def load(self, lowered: LoweredTask, table: TaskTable) -> LoadedTask:
        """The task in the classes of ``table``. Raises ``UnknownClass`` where none of them holds it."""
        keys, lead = table.fitting.fit(lowered.classes), lowered.lead
        contents = {
            key: slot_arrays(part, key, self._family.config, self._family.dtype, self._base_bias)
            for part, key in zip(lowered.parts, keys, strict=True)
        }
        first = first_layer(lowered.task, self._family.config)
        return LoadedTask(lowered.task, contents, lowered.folded.head.pooling, self._room(lead), lead, first)

    def lower(self, task: Task) -> LoweredTask:
        """Raises ``InvalidTask``: another backbone, deltas that do not go together, too little room left for a text."""
        if task.backbone.fingerprint != self._backbone.fingerprint:
            raise InvalidTask(
                f"task {task.id!r} was made for backbone {task.backbone.name!r} ({task.backbone.fingerprint[:19]}...), "
                f"this engine serves {self._backbone.name!r} ({self._backbone.fingerprint[:19]}...)"
            )
        self._check_domain(task)
        if task.head.type == "fill-mask" and self._backbone.config.looks_up:
            raise InvalidTask(f"task {task.id!r} fills masks, which tables do not know; serve it on the whole backbone")
        if task.head.pooling == "pooler" and not task.head.reads_tokens and not self._backbone.config.pooler:
            raise InvalidTask(f"task {task.id!r} reads the pooler's vector, and this backbone has no pooler")
        check_answers(task)
        if self._room(lead := task_lead(task)) < LEAST_ROOM:
            raise InvalidTask(
                f"task {task.id!r} puts {lead.tokens} virtual tokens before a text, at position {lead.first_position}; "
                f"of {self._longest} tokens {self._room(lead)} are left, {LEAST_ROOM} are needed"
            )
        folded, parts = self._family.network.lower(task, self._params)
        return LoweredTask(task, folded, parts, lead)

    def _check_domain(self, task: Task) -> None:
        """Raises ``InvalidTask`` where the domain that a task learnt in is not there."""
        domain, tables = task.preprocessing.domain, self._backbone.tables
        if domain is None:
            return
        if tables is None:
            raise InvalidTask(f"task {task.id!r} is of domain {domain!r}; this backbone has no tables")
        try:
            full_name = tables.full_name(domain)
        except NotFound as error:
            raise InvalidTask(f"task {task.id!r}: {error.message}") from error
        if domain != full_name:
            raise InvalidTask(
                f"task {task.id!r} must name its domain with the n-gram layers that it learnt from, such as "
                f"{full_name!r}, found {domain!r}"
            )

    def _room(self, lead: Lead) -> int:
        """Most tokens of a text behind ``lead``: within the engine's limit and the backbone's positions."""
        return lead.room(self._longest, self._backbone.config.max_positions)
