"""Programs that are used much, compiled anew as one function: on a CPU they are compiled function by function first,
which takes a fraction of the time, and each call of a function costs their batches some time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from jpets.engine.compilation.process import CompilingProcess
from jpets.engine.compilation.program_memory import ProgramMemory
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import WHOLE_GAIN, Program, ProgramKey, chain_of, whole_family
from jpets.engine.programs.store import ProgramStore
from jpets.errors import OutOfSpace
from jpets.free_memory import return_free_memory

log = logging.getLogger(__name__)

IDLE_SHARE = 0.1
"""Share of what compiling takes that batches have lost when a program is compiled while no other one is to be."""
UNUSED_SHARE = 0.002
"""The same for one that is there while the device has nothing to do: compiling then costs no query anything."""
RETRY_SECONDS = 600.0
"""Seconds until a program that could not be had is tried again, as there may be room then; each further time twice as
long."""


class WholePrograms:
    """``exchange`` receives a program for the place of the one of its key that is served. One thread calls this."""

    def __init__(
        self,
        replica: Replica,
        store: ProgramStore,
        process: CompilingProcess,
        memory: ProgramMemory,
        exchange: Callable[[Program], None],
    ) -> None:
        self._replica = replica
        self._store = store
        self._process = process
        self._memory = memory
        self._exchange = exchange
        self.refused: dict[ProgramKey, float] = {}
        """Programs that could not be had so, each with the time from which it is tried again (``time.monotonic``)."""
        self._refusals: Counter[ProgramKey] = Counter()

    def worn(self, compile_seconds: float, *, unused: bool) -> ProgramKey | None:
        """The program whose batches have lost most by its functions, if that is a share of what compiling it as one
        takes: as much longer than ``compile_seconds`` as it calls more functions than it has. The share is small where
        the device is ``unused``."""
        least = compile_seconds * (UNUSED_SHARE if unused else IDLE_SHARE)
        now = time.monotonic()
        most = max(
            (p for p in self._replica.programs if p.chained and self.refused.get(p.key, 0.0) <= now),
            key=lambda program: program.computed,
            default=None,
        )
        if most is None:
            return None
        family = self._replica.family
        calls, functions = len(family.network.chain(most.key.variant)), len(chain_of(family, most.key))
        return most.key if most.computed * WHOLE_GAIN >= least * calls / functions else None

    def bring(self, key: ProgramKey, unless: threading.Event | None) -> bool:
        """Has a program that is there compiled as one function. It stays as it is, and False is returned, where that
        fails, takes more room than there is, or is given up by ``unless``."""
        family, exchanged = whole_family(self._replica.family), False
        try:
            if self._memory.has_room(key, evict=False):
                program = self._store.load(family, key)
                if program is None and self._process.compile(family, key, unless=unless) is not None:
                    program = self._store.load(family, key)
                if program is not None and not self._process.closed:
                    self._exchange(program)
                    exchanged = True
        except OutOfSpace as full:
            log.warning("a program stays in several functions: %s", full)
        except Exception:  # it goes on as it was
            log.exception("a program could not be made one function")
            self._store.forget(family, key)
        if not (exchanged or (unless is not None and unless.is_set())):
            self.refused[key] = time.monotonic() + RETRY_SECONDS * 2 ** self._refusals[key]
            self._refusals[key] += 1
        return_free_memory()
        return exchanged
