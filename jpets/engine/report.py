"""An engine's report on itself: plain data of one moment, for metrics, pages and benches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from jpets.config import SizingRule
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.memory import DeviceUse
from jpets.engine.tasks.entries import Tier

if TYPE_CHECKING:
    from jpets.engine.compilation.background import BackgroundCompiler
    from jpets.engine.costs.live_profile import LiveProfile
    from jpets.engine.planning.merged import MergedCopies
    from jpets.engine.queue.response_cache import ResponseCache
    from jpets.engine.residency.residency import Residency
    from jpets.engine.tasks.table import TaskTable
    from jpets.engine.workloads.row_cache import RowCache


class ClassReport(NamedTuple):
    """The banks of a class: slots in use, all slots but slot 0, bytes with every free slot."""

    used: int
    slots: int
    bytes: int


@dataclass(frozen=True)
class ProgramsReport:
    """Programs compiled in the background, that failed, that are still to come, that left for others; the estimated
    host memory of all programs."""

    compiled: int
    failed: int
    waiting: int
    evicted: int
    host_bytes: int

    @classmethod
    def of(cls, compiler: BackgroundCompiler) -> Self:
        memory = compiler.memory
        return cls(compiler.compiled, compiler.failed, compiler.waiting, memory.evicted, memory.used)


@dataclass(frozen=True)
class CostsReport:
    """Classes whose costs were measured on this kind of device, and those whose costs are coarse until they are."""

    measured: int
    coarse: int

    @classmethod
    def of(cls, profile: LiveProfile) -> Self:
        return cls(len(profile.measured), len(profile.coarse))


@dataclass(frozen=True)
class ResponsesReport:
    """The response cache: queries with an answer in it, and without one; estimated host memory."""

    hits: int
    misses: int
    bytes: int

    @classmethod
    def of(cls, cache: ResponseCache) -> Self:
        return cls(cache.hits, cache.misses, cache.bytes)


@dataclass(frozen=True)
class RowsReport:
    """Different rows of tables that batches read: those that the device had, and those that the host brought. There are
    none where programs read the tables themselves."""

    hits: int = 0
    misses: int = 0

    @classmethod
    def of(cls, cache: RowCache | None) -> Self:
        return cls() if cache is None else cls(cache.hits, cache.misses)


@dataclass(frozen=True)
class TasksReport:
    """Tasks of a device, and how they arrived and left."""

    known: int
    tiers: Mapping[Tier, int]
    """How many tasks each tier holds; the last one has them all."""
    hits: int
    """Queries that found their task on the device."""
    misses: int
    brought: Mapping[Tier, int]
    """Tasks that were written to the device, by the tier that they came from."""
    brought_bytes: int
    failed: int
    """Times that a task could not be brought."""
    evicted: int
    merged: int
    """Hot tasks that have merged weights."""
    host_bytes: int
    """Host memory of loaded tasks."""

    @classmethod
    def of(cls, tasks: TaskTable, residency: Residency, merged: MergedCopies) -> Self:
        counts = residency.counts
        return cls(
            known=len(tasks),
            tiers=residency.tiers(),
            hits=tasks.hits,
            misses=tasks.misses,
            brought={"host": counts["host"], "repository": counts["load"]},
            brought_bytes=counts["bytes"],
            failed=counts["failed"],
            evicted=tasks.evictions,
            merged=len(merged.copies),
            host_bytes=residency.host_bytes,
        )


@dataclass(frozen=True)
class DeviceReport:
    """One device, or several that compute each batch together. Counts are since the engine was made."""

    answers: Mapping[str, int]
    """Queries answered, by ``ok`` or the error's code."""
    batches: int
    fallbacks: int
    """Batches for which a better program was still missing."""
    missed_seconds: float
    """What they would have been faster in those programs, as predicted."""
    computing_seconds: float
    """Time that the device took for batches."""
    predicted_seconds: float
    """What was expected of that."""
    real_tokens: int
    computed_tokens: int
    """Tokens computed, padding included."""
    request_path_compiles: int
    """Compilations that queries had to wait for."""
    out_of_memory: int
    """Batches and tasks that found no room on the device."""
    waiting: int
    """Queries that wait for a batch."""
    busy: bool
    """A batch is on the device."""
    programs: ProgramsReport
    costs: CostsReport
    responses: ResponsesReport
    rows: RowsReport
    tasks: TasksReport
    classes: Mapping[ClassKey, ClassReport]
    kernels: Sequence[tuple[str, str, str]]
    """The candidate of each operator: (class, operator, candidate), the class empty for all that are not named."""
    memory: DeviceUse
    limit: float
    """Bytes that the engine may take; infinite if there is no limit."""
    bytes_in_use: int | None
    """The device's own count of bytes; None if it has none."""


@dataclass(frozen=True)
class BalanceReport:
    """How devices share tasks. ``moves`` counts tasks ``moved`` and ``copied``, moves that ``failed``, and tasks that
    were ``rescued`` from a device that does not work any more."""

    moves: Mapping[str, int]
    moved_bytes: int
    leaving: int
    """Old places of moved tasks that still have queries."""
    rounds: int
    """Times that devices' loads were compared."""
    phi: float
    """Least over most load of a device at the last comparison; 1 if chance explains the difference."""


@dataclass(frozen=True)
class StudentsReport:
    """How groups of students answer. ``together`` texts of a group are computed at a time, ``side_by_side`` groups of
    the present size on all devices; ``largest`` is the number of students of the largest group, ``answering`` how many
    of them answer now; ``answers`` counts answers by the number of students that made them, and ``kept`` is by that
    number the mean share of the teacher's score that groups keep, as far as they say."""

    rule: SizingRule
    together: int
    side_by_side: int
    groups: int
    largest: int
    answering: int
    drops: int
    additions: int
    answers: Mapping[int, int]
    kept: Mapping[int, float]


@dataclass(frozen=True)
class EngineReport:
    """One entry of ``devices`` for each device; ``balance`` is None if there is only one engine, ``students`` where it
    has no groups."""

    devices: Sequence[DeviceReport]
    balance: BalanceReport | None = None
    students: StudentsReport | None = None

    @property
    def known(self) -> int:
        """Tasks that are known; a task on several devices counts for each."""
        return sum(device.tasks.known for device in self.devices)

    @property
    def device_bytes(self) -> int:
        """Bytes taken, of all devices together."""
        return sum(device.memory.total for device in self.devices)

    @property
    def idle(self) -> bool:
        """No query waits or runs."""
        return not any(device.waiting or device.busy for device in self.devices)
