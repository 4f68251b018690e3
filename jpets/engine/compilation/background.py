"""Brings programs while queries are answered: compiled in another process of low priority, loaded here."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from jpets.engine.compilation.process import HURRIED, IDLE, CompilingProcess
from jpets.engine.compilation.program_memory import IDLE_SECONDS, ProgramMemory
from jpets.engine.compilation.wanted import Wanted
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.engine.programs.store import ProgramStore
from jpets.errors import SHUTTING_DOWN, EngineFailure, JpetsError, OutOfSpace, Saturated

log = logging.getLogger(__name__)

PROCESS_IDLE_SECONDS = 30.0
"""Seconds until an idle compiling process ends: it holds 600 MB."""
COMPILE_SECONDS = 2.0
"""Seconds of all cores that compiling takes, until a program was compiled. A program is compiled once batches without
it have lost as much: so at most twice the time is lost that would be if the coming traffic were known (the rule of the
rented skis)."""
IDLE_SHARE = 0.1
"""Share of that loss at which a program is compiled, at the lowest priority, while no other one is to be."""
RETRY_SECONDS = 30.0
"""Seconds until a program that could not be had may be asked for again; each further time twice as long, up to an
hour."""
MOST_RETRY_SECONDS = 3600.0


class BackgroundCompiler:
    """Brings the programs that batches keep missing and, while there are none, the ``menu`` as far as ``memory`` has
    room.

    ``add`` receives each loaded program.
    """

    def __init__(
        self,
        replica: Replica,
        store: ProgramStore,
        folder: pathlib.Path,
        add: Callable[[Program], None],
        memory: ProgramMemory,
    ) -> None:
        self._replica = replica
        self._store = store
        self._add = add
        self.memory = memory
        self.process = CompilingProcess(store, folder, replica.mesh)
        self._menu: list[ProgramKey] = []
        self._wanted = Wanted()
        self._needed: dict[ProgramKey, Future[None]] = {}
        """Programs that are to stay, each with the future that waits for it; they are compiled before all others."""
        self._failures: Counter[ProgramKey] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._thread = threading.Thread(target=self._work, name="jpets-compile", daemon=True)
        self.compiled = 0
        self.failed = 0
        self.compile_seconds = COMPILE_SECONDS
        """Seconds for which compiling a program takes all cores, on average."""
        self._timed = 0

    def start(self, menu: Iterable[ProgramKey]) -> None:
        self._menu = list(menu)
        self._thread.start()

    def want(self, key: ProgramKey, seconds: float) -> None:
        """Notes that a batch would have been ``seconds`` faster in ``key``."""
        with self._changed:
            if self._wanted.miss(key, seconds) >= self.compile_seconds * IDLE_SHARE:
                self._changed.notify()

    def need(self, key: ProgramKey) -> Future[None]:
        """Brings a program that is to stay, before all others. The future raises ``EngineFailure`` where it cannot be
        had, ``Saturated`` where the engine closes first."""
        with self._changed:
            done = self._needed.setdefault(key, Future())
            if self._closed:
                self._refuse_needed()
            self._changed.notify()
            return done

    def offer(self, menu: Iterable[ProgramKey]) -> None:
        """Adds to the menu."""
        with self._changed:
            self._menu += menu
            self._changed.notify()

    def compile_other(self, family: Family, key: ProgramKey) -> Program | None:
        """A program of another family than the engine's, which is not kept, in turn with the engine's. None where it
        could not be had, or the engine closes."""
        seconds = self.process.compile(family, key)
        with self._changed:
            self._changed.notify()  # the process may now have to end
        if seconds is None:
            return None
        program = self._store.load(family, key)
        self._store.forget(family, key)
        return program

    @property
    def waiting(self) -> int:
        with self._changed:
            wanted = self._wanted.count(self.compile_seconds)
            return len(self._menu) + wanted + len(self._needed) + self._busy

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._refuse_needed()
            self._changed.notify()
        self.process.close()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _refuse_needed(self) -> None:
        for done in self._needed.values():
            if not done.done():
                done.set_exception(Saturated(SHUTTING_DOWN))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or (next_one := self._next())):
                    if not self._changed.wait(PROCESS_IDLE_SECONDS if self.process.runs else None):
                        self.process.end_if_idle()
                if self._closed:
                    return
                assert next_one is not None
                key, wanted = next_one
                needed = key if key in self._needed else None
                self._wanted.bring(key)
                self._busy = True
            problem: JpetsError | None = None
            try:
                if needed is not None:
                    problem = self._bring_needed(needed)
                else:
                    self._bring(key, wanted)
            except Exception as error:  # one program fewer; the queries run in others
                log.exception("a program could not be added")
                self._store.forget(self._replica.family, key)
                self._failed(key)
                unforeseen = EngineFailure(f"a program could not be added: {type(error).__name__}")
                problem = error if isinstance(error, JpetsError) else unforeseen
            if needed is not None:
                self._tell(needed, problem)
            self._busy = False

    def _next(self) -> tuple[ProgramKey, bool] | None:
        """The program to bring next, and whether it is urgent: one that is to stay, what batches miss most, or one of
        the menu."""
        if self._needed:
            return next(iter(self._needed)), False
        if (key := self._wanted.most(self.compile_seconds)) is not None:
            return key, True
        if (key := self._wanted.most(self.compile_seconds * IDLE_SHARE)) is not None:
            return key, False
        return (self._menu.pop(0), False) if self._menu else None

    def _failed(self, key: ProgramKey) -> None:
        self.failed += 1
        wait = min(MOST_RETRY_SECONDS, RETRY_SECONDS * 2 ** self._failures[key])
        self._failures[key] += 1
        with self._changed:
            self._wanted.put_off(key, wait)

    def _bring_needed(self, key: ProgramKey) -> JpetsError | None:
        """Adds a program that is to stay, if it is still missing. Returns the error that keeps it from coming, or
        None."""
        if self.memory.has(key):
            return None
        try:
            program = self._load(key, IDLE)
        except OutOfSpace as full:
            return full
        if program is None:
            return EngineFailure("a program could not be compiled; try again later")
        self._add(program)
        self.compiled += 1
        return None

    def _tell(self, key: ProgramKey, problem: JpetsError | None) -> None:
        with self._changed:
            done = self._needed.pop(key)
            if not done.done():
                done.set_exception(problem) if problem is not None else done.set_result(None)

    def _load(self, key: ProgramKey, niceness: int) -> Program | None:
        return self._store.load(self._replica.family, key) or self._compile(key, niceness)

    def _bring(self, key: ProgramKey, wanted: bool) -> None:
        """Adds a program if it is still missing and there is room. Idle programs leave only for a wanted one."""
        if self.memory.has(key):
            return
        gone: list[ProgramKey] | None = None
        if wanted or not self.memory.full:
            try:
                program = self._load(key, HURRIED if wanted else IDLE)
            except OutOfSpace as full:
                log.warning("a program must wait: %s", full)
            else:
                if program is None:
                    if not self._closed:
                        log.warning("a program was not compiled, or not kept; it is tried again later")
                        self._failed(key)
                    return
                gone = self.memory.make_room(program, evict=wanted)
                if gone is not None and not self._closed:
                    self._add(program)
                    self.memory.added(program)
                    self.compiled += 1
                    if wanted:
                        with self._changed:
                            self._wanted.brought()
        with self._changed:
            for absent in [key] if gone is None else gone:
                self._wanted.put_off(absent, IDLE_SECONDS)
            if gone is None and not wanted:
                self._menu.clear()  # the rest of it comes only if batches miss it

    def _compile(self, key: ProgramKey, niceness: int) -> Program | None:
        family = self._replica.family
        seconds = self.process.compile(family, key, niceness=niceness)
        if seconds is None:
            return None
        self._timed += 1
        self.compile_seconds += (seconds / (os.cpu_count() or 1) - self.compile_seconds) / self._timed
        return self._store.load(family, key)
