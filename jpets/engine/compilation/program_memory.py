"""The memory of compiled programs, and which programs leave when better ones need the room."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from jpets.engine.device.memory import DeviceMemory
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mappings import SPARE_MAPPINGS, mappings_left
from jpets.engine.programs.program import Program, ProgramKey
from jpets.free_memory import return_free_memory

IDLE_SECONDS = 60.0
"""Seconds without a batch after which a program may leave for one that batches miss."""
COUNTED_SECONDS = 10.0
"""Seconds for which a count of memory mappings is used again: it takes milliseconds, and others take and free some."""
KEPT_MAPPINGS = 2 * SPARE_MAPPINGS
"""Memory mappings that stay free when missed programs are added: an eighth of the usual limit is for the first
programs of backbones that come later."""


class ProgramMemory:
    """Keeps the programs of ``replica`` within ``budget`` bytes of host memory and within the process's memory
    mappings, and the memory of their runs within the device's limit.

    Programs that were there from the start always stay: together they take any batch of its classes. So do the core of
    the newest classes and, until that is there, the core that serves meanwhile. Only one thread, the one that adds
    programs, makes room.
    """

    def __init__(self, replica: Replica, budget: int, device: DeviceMemory) -> None:
        self._replica = replica
        self._device = device
        self._budget = budget
        self._added: set[ProgramKey] = set()
        self._unmapped, self._counted_until = 0, 0.0
        """Memory mappings for further programs, and the time until which this count is used."""
        self.evicted = 0

    @property
    def used(self) -> int:
        """Bytes of all programs, the core's included."""
        return sum(program.host_bytes for program in self._programs().values())

    def has(self, key: ProgramKey) -> bool:
        return self._replica.has_program(key)

    def missing_core(self) -> list[ProgramKey]:
        """Core programs of the newest classes that are not there: without one of them their rows run apart."""
        return [key for key in self._replica.generations[-1].core if not self.has(key)]

    def free(self, keys: Iterable[ProgramKey]) -> None:
        """These programs may leave from now on: others take all that they took. Any thread may call this."""
        self._added.update(keys)

    def keep(self, keys: Iterable[ProgramKey]) -> None:
        """These programs have to stay from now on. Any thread may call this."""
        self._added.difference_update(keys)

    def has_room(self, key: ProgramKey, *, evict: bool) -> bool:
        """Whether a program that was not compiled yet is likely to fit: it is taken to need what the one with the most
        similar number of classes does."""
        classes = len(key.variant.classes())
        programs = self._programs().values()
        similar = min(programs, key=lambda p: abs(len(p.key.variant.classes()) - classes), default=None)
        if similar is None:
            return True
        if time.monotonic() >= self._counted_until:
            self._unmapped = mappings_left() - KEPT_MAPPINGS
            self._counted_until = time.monotonic() + COUNTED_SECONDS
        return self._leaving(key, similar, evict, self._unmapped - similar.mappings) is not None

    def make_room(self, program: Program, *, evict: bool) -> list[ProgramKey] | None:
        """Makes idle programs leave, if it may, the longest idle first, until ``program``, loaded already, fits.
        Returns them.

        None, and nothing goes, where it does not fit.
        """
        self._counted_until = 0.0
        leaving = self._leaving(program.key, program, evict, mappings_left() - KEPT_MAPPINGS)
        for key in leaving or ():
            self._replica.drop_program(key)
            self._added.discard(key)
        self.evicted += len(leaving or ())
        return leaving

    def added(self, program: Program) -> None:
        """From now on ``program`` may have to leave for others."""
        self._added.add(program.key)
        return_free_memory()

    def _whole_core_fits(self, like: Program, missing: int, unmapped: int, may_go: Sequence[Program]) -> bool:
        """Whether all that is missing of the core, each taking what ``like`` does, fits if all these go; ``missing``
        and ``unmapped`` are for one. A part of it would cost programs in use, and rows would still run apart."""
        others = len(self.missing_core()) - 1
        missing += others * like.host_bytes - sum(own.host_bytes for own in may_go)
        return missing <= 0 <= unmapped - others * like.mappings + sum(own.mappings for own in may_go)

    def _core(self) -> frozenset[ProgramKey]:
        """The core of the newest generation, and of the latest complete one."""
        generations = self._replica.generations
        complete = next(each for each in reversed(generations) if all(map(self.has, each.core)))
        return frozenset((*generations[-1].core, *complete.core))

    def _programs(self) -> dict[ProgramKey, Program]:
        return {program.key: program for program in self._replica.programs}

    def _leaving(self, key: ProgramKey, like: Program, evict: bool, unmapped: int) -> list[ProgramKey] | None:
        """The idle programs that have to leave for one that takes what ``like`` does and leaves ``unmapped`` mappings;
        None where it does not fit all the same."""
        programs = self._programs()
        missing = sum(each.host_bytes for each in programs.values()) + like.host_bytes - self._budget
        horizon = time.monotonic() - IDLE_SECONDS
        core = self._core()
        may_go = [p for own, p in programs.items() if evict and own in self._added and own not in core]
        used_too = key in core and self._whole_core_fits(like, missing, unmapped, may_go)
        idle = [p for p in may_go if used_too or p.last_used < horizon]
        leaving: list[ProgramKey] = []
        staying = {**programs, key: like}
        for each in sorted(idle, key=lambda p: p.last_used):
            if missing <= 0 <= unmapped and self._device.holds(list(staying.values())):
                break
            leaving.append(each.key)
            missing -= each.host_bytes
            unmapped += each.mappings
            del staying[each.key]
        fits = missing <= 0 <= unmapped and self._device.holds(list(staying.values()))
        return leaving if fits else None
