"""Host memory of a server: what its process takes, and what it will take once everything is in use."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.filesize import decimal

from jpets.config import EngineSettings
from jpets.engine.device.memory import GIGABYTE
from jpets.free_memory import usual_programs_mb
from jpets.plot.table import SUFFIX

if TYPE_CHECKING:
    from serving.hosted.services import Services  # it needs a server's packages, and a process's memory does not

OWN = Path("/proc/self")
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
"""How a mapping's part of ``smaps`` begins."""
SHARED = "Pss:"
"""A process's part of pages, those that several map divided among them; a page that one maps twice counts once."""


@dataclass(frozen=True)
class HostUse:
    """Bytes. ``now`` is what the process takes; ``tables`` and ``tasks`` are still to come: vectors that were not read
    yet, and tasks that wait in host memory for a place on a device. ``programs`` may come too: compiled in idle moments
    for what the traffic brings, at most so much."""

    now: int
    tables: int
    tasks: int
    programs: int

    @classmethod
    def of(cls, services: Services, settings: EngineSettings) -> Self | None:
        """None where the system does not tell (Linux does)."""
        now = process_bytes(OWN)
        if now is None:
            return None
        known = [service.backbone.tables for service in services.all]
        every = sum(table.bytes for tables in known if tables is not None for table in tables.report())
        devices = [device for engine in services.started for device in engine.report().devices]
        used = sum(device.programs.host_bytes for device in devices)
        most = (settings.program_memory_mb or usual_programs_mb(len(devices))) * len(devices) << 20
        return cls(
            now,
            max(0, every - in_memory(OWN, SUFFIX)),
            _waiting(services, settings),
            max(0, most - used) if settings.background_compile else 0,
        )

    @property
    def total(self) -> int:
        """With all tables and tasks in use, and no more programs."""
        return self.now + self.tables + self.tasks

    def __str__(self) -> str:
        parts = [f"{name} {decimal(size)}" for name, size in (("tables", self.tables), ("tasks", self.tasks)) if size]
        more = f", {decimal(self.total)} when all is in use ({', '.join(parts)})" if parts else ""
        programs = f"; further programs may take {decimal(self.programs)}" if self.programs else ""
        return f"{decimal(self.now)} now{more}{programs}"


def _waiting(services: Services, settings: EngineSettings) -> int:
    """Bytes of tasks that no device has a place for: as large as the others in their files, within the limit."""
    sizes = [stored.bytes for stored in services.repository.every()]
    places = sum(device.tasks.tiers["device"] for engine in services.started for device in engine.report().devices)
    left = max(0, len(sizes) - max(places, settings.slots))
    return int(min(settings.host_memory_gb * GIGABYTE, left * sum(sizes) / max(1, len(sizes))))


def process_bytes(process: Path) -> int | None:
    """What a process of ``/proc`` takes; None where the system does not tell."""
    with contextlib.suppress(OSError):
        lines = (process / "smaps_rollup").read_text().splitlines()
        return sum(_kilobytes(line) for line in lines if line.startswith(SHARED))
    return None


def in_memory(process: Path, suffix: str) -> int:
    """What a process has in memory of mapped files whose names end with ``suffix``."""
    found, own = 0, False
    with contextlib.suppress(OSError), (process / "smaps").open() as file:
        for line in file:
            if MAPPING.match(line):
                own = line.rstrip().endswith(suffix)
            elif own and line.startswith(SHARED):
                found += _kilobytes(line)
    return found


def _kilobytes(line: str) -> int:
    return int(line.split()[1]) << 10
