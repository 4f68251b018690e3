"""What an engine says of itself: plain data of one moment, for metrics, pages and benches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from jpets.deltas.protocol import ClassKey
from jpets.engine.device.memory import DeviceUse
from jpets.engine.tasks.entries import Tier

if TYPE_CHECKING:
    from jpets.engine.compilation.background import BackgroundCompiler
    from jpets.engine.planning.merged import MergedCopies
    from jpets.engine.queue.response_cache import ResponseCache
    from jpets.engine.residency.residency import Residency
    from jpets.engine.tasks.table import TaskTable


class ClassReport(NamedTuple):
    """The banks of a class: slots in use, all slots but slot 0, bytes with every free slot."""

    used: int
    slots: int
    bytes: int


@dataclass(frozen=True)
class ProgramsReport:
    """Programs that were compiled in the background, could not be, are still to be, left for others; host memory of all
    programs, estimated."""

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
class ResponsesReport:
    """The response cache: queries that it had an answer for, and had none for; host memory, estimated."""

    hits: int
    misses: int
    bytes: int

    @classmethod
    def of(cls, cache: ResponseCache) -> Self:
        return cls(cache.hits, cache.misses, cache.bytes)


@dataclass(frozen=True)
class TasksReport:
    """Tasks of a device, and how they came to it and left it."""

    known: int
    tiers: Mapping[Tier, int]
    """How many each tier holds; the last one has them all."""
    hits: int
    """Queries that found their task on the device."""
    misses: int
    brought: Mapping[Tier, int]
    """Tasks that were written to the device, by the tier where they were."""
    brought_bytes: int
    failed: int
    """Times that a task could not be brought."""
    evicted: int
    merged: int
    """Hot tasks that have merged weights."""
    host_bytes: int
    """Host memory of tasks, in the device's form."""

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
    """One device, or those that compute each batch together. Counts are since the engine was made."""

    answers: Mapping[str, int]
    """Queries answered, by ``ok`` or the error's code."""
    batches: int
    fallbacks: int
    """Batches for which a better program was still missing."""
    real_tokens: int
    computed_tokens: int
    """Tokens computed, padding included."""
    request_path_compiles: int
    """Compilations that queries had to wait for."""
    out_of_memory: int
    """Batches and tasks that the device had no room for."""
    waiting: int
    """Queries that wait for a batch."""
    busy: bool
    """A batch is on the device."""
    programs: ProgramsReport
    responses: ResponsesReport
    tasks: TasksReport
    classes: Mapping[ClassKey, ClassReport]
    memory: DeviceUse
    limit: float
    """Bytes that may be taken; infinite where nothing sets a limit."""
    bytes_in_use: int | None
    """What the device itself counts; None where it does not."""


@dataclass(frozen=True)
class BalanceReport:
    """How devices share tasks. ``moves`` counts tasks ``moved`` and ``copied``, and moves that ``failed``."""

    moves: Mapping[str, int]
    moved_bytes: int
    leaving: int
    """Old places of moved tasks that still have queries."""
    rounds: int
    """Times that devices' loads were compared."""
    phi: float
    """Least over most load of a device at the last comparison; 1 where chance explains it."""


@dataclass(frozen=True)
class EngineReport:
    """One entry of ``devices`` for each device; ``balance`` is None where there is only one engine."""

    devices: Sequence[DeviceReport]
    balance: BalanceReport | None = None

    @property
    def known(self) -> int:
        """Tasks that are known; one on several devices counts for each."""
        return sum(device.tasks.known for device in self.devices)

    @property
    def device_bytes(self) -> int:
        """Bytes that are taken of all devices."""
        return sum(device.memory.total for device in self.devices)

    @property
    def idle(self) -> bool:
        """No query waits or runs."""
        return not any(device.waiting or device.busy for device in self.devices)
