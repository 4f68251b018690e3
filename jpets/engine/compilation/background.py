"""Brings programs while queries are answered: compiled in another process, loaded here."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from jpets.engine.compilation.process import HURRIED, IDLE, CompilingProcess
from jpets.engine.compilation.program_memory import IDLE_SECONDS, ProgramMemory
from jpets.engine.compilation.wanted import Wanted
from jpets.engine.compilation.whole import IDLE_SHARE, WholePrograms
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.engine.programs.store import ProgramStore
from jpets.errors import SHUTTING_DOWN, EngineFailure, JpetsError, OutOfSpace, Saturated
from jpets.failures import as_told

log = logging.getLogger(__name__)

PROCESS_IDLE_SECONDS = 30.0
"""Seconds until an idle compiling process ends: it holds 600 MB."""
COMPILE_SECONDS = 2.0
"""Seconds of all cores that compiling takes, until a program was compiled. A program is compiled once batches without
it have lost as much: so at most twice the time is lost that would be if the coming traffic were known (the rule of the
rented skis)."""
UNUSED_SECONDS = 5.0
"""Seconds without a query after which the device has nothing to do."""
HURRY_SHARE = 0.5
"""The same while compiling is hurried, for another program may soon have cost batches more; once all of them together
have lost what compiling takes, it is ``IDLE_SHARE`` again."""
MENU_SHARE = 0.02
"""The same while programs of the menu wait, which no batch has missed at all."""
HURRY_RATE = 0.05
"""Share of all time that batches lose for want of programs from which on compiling is hurried, and nothing is compiled
that no batch missed."""
QUIET_RATE = 0.01
"""The same up to which programs that are there are compiled anew: meanwhile others that come to be missed wait."""
LOOK_SECONDS = 1.0
"""Seconds between looks at that share."""
MOST_WAIT = 120.0
"""Seconds for which programs that only measure wait for those that batches miss."""
RETRY_SECONDS = 30.0
"""Seconds until a program that could not be had may be asked for again; each further time twice as long, up to an
hour."""
MOST_DOUBLINGS = 7


class _Next(NamedTuple):
    """The program to bring next. Idle programs leave for a ``wanted`` one; a ``whole`` one is there already, and is to
    be compiled as one function; one for which there is time now, as no query comes, is ``spare``."""

    key: ProgramKey
    wanted: bool
    niceness: int
    whole: bool = False
    spare: bool = False


class BackgroundCompiler:
    """Brings the programs that batches keep missing and, once they miss none badly, the ``menu`` as far as ``memory``
    has room. While nothing else is to be compiled, it compiles those that took most time anew, each as one function,
    once batches have lost a part of what compiling takes by their several functions: a small one where no query comes,
    and then it is given up for any other that batches miss.

    ``add`` receives each loaded program, ``exchange`` one for the place of a program that is there.
    """

    def __init__(
        self,
        replica: Replica,
        store: ProgramStore,
        folder: pathlib.Path,
        add: Callable[[Program], None],
        memory: ProgramMemory,
        exchange: Callable[[Program], None],
    ) -> None:
        self._replica = replica
        self._store = store
        self._add = add
        self.memory = memory
        self.process = CompilingProcess(store, folder, replica.mesh)
        self._whole = WholePrograms(replica, store, self.process, memory, exchange)
        self._menu: list[ProgramKey] = []
        self._expected: dict[ProgramKey, None] = {}
        self._wanted = Wanted()
        self._needed: dict[ProgramKey, Future[None]] = {}
        """Programs that are to stay, each with the future that waits for it; they are compiled before all others."""
        self._failures: Counter[ProgramKey] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._spare: threading.Event | None = None
        """Gives up what is compiled now, if that gives way to any program that batches miss."""
        self._idle: threading.Event | None = None
        """The same of what is compiled at a low priority: it gives way to a program that somebody waits for."""
        self._other: threading.Event | None = None
        """The same of what is compiled for others."""
        self.idle_seconds: Callable[[], float] = lambda: 0.0
        """Seconds since the device had something to do."""
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
            self._wanted.miss(key, seconds)
            if self._hurried and not self.process.hurry():  # at its low priority it could keep this one for minutes
                for idle in (self._other, self._idle):
                    if idle is not None:
                        self.process.give_up(idle)
            if self._wanted.most(self._least()) is not None:
                self._changed.notify_all()
                if self._spare is not None and self._missed() is not None:
                    self.process.give_up(self._spare)

    def missed(self) -> Sequence[ProgramKey]:
        """A few programs that batches miss most, the most missed first. Those that are being brought, or were put off,
        are not among them."""
        with self._changed:
            return self._wanted.foremost()

    def barred(self, key: ProgramKey) -> bool:
        """Whether a program cannot be had for now: it failed, or there was no room."""
        with self._changed:
            return self._wanted.barred(key)

    def need(self, key: ProgramKey) -> Future[None]:
        """Brings a program that is to stay, before all others. The future raises ``EngineFailure`` where it cannot be
        had, ``Saturated`` where the engine closes first."""
        with self._changed:
            done = self._needed.setdefault(key, Future())
            if self._closed:
                self._refuse_needed()
            if self._spare is not None:
                self.process.give_up(self._spare)
            elif not self.process.hurry() and self._idle is not None:
                self.process.give_up(self._idle)
            if self._other is not None:
                self.process.give_up(self._other)
            self._changed.notify_all()
            return done

    def offer(self, menu: Iterable[ProgramKey], *, first: bool = False) -> None:
        """Adds to the menu; ``first``: what expected traffic will miss, which comes before what batches miss."""
        with self._changed:
            if first:
                absent = (key for key in menu if self._wanted.open(key) and not self.memory.has(key))
                self._expected.update(dict.fromkeys(absent))
            else:
                self._menu += menu
            self._changed.notify_all()

    def compile_other(self, family: Family, key: ProgramKey) -> Program | None:
        """A program of another family than the engine's, which is not kept. It waits while batches miss programs of the
        engine's, up to ``MOST_WAIT`` seconds at a time, and gives way to one that is needed more. None where it could
        not be had; raises ``Saturated`` where the engine closes. For one thread."""
        while True:
            with self._changed:
                until = time.monotonic() + MOST_WAIT
                while not self._closed and time.monotonic() < until:
                    missed = self._wanted.most(self.compile_seconds * IDLE_SHARE) is not None
                    if not (missed or self._hurried or self._needed):
                        break
                    self._changed.wait(LOOK_SECONDS)
                unless = self._other = threading.Event()
            seconds = None if self._closed else self.process.compile(family, key, unless=unless)
            with self._changed:
                self._other = None
                self._changed.notify_all()  # the process may now have to end
            if self._closed or seconds is not None or not unless.is_set():
                break
        if self._closed:
            raise Saturated(SHUTTING_DOWN)
        if seconds is None:
            return None
        program = self._store.load(family, key)
        self._store.forget(family, key)
        return program

    @property
    def waiting(self) -> int:
        with self._changed:
            wanted = self._wanted.count(self.compile_seconds)
            in_parts = self._whole.worn(self.compile_seconds, unused=True) is not None
            core = sum(map(self._wanted.open, self.memory.missing_core()))
            missing = len(self._menu) + len(self._expected) + core
            return missing + wanted + len(self._needed) + (self._busy or in_parts)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._refuse_needed()
            self._changed.notify_all()
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
                    in_parts = self._whole.worn(self.compile_seconds, unused=True) is not None
                    look_again = self._hurried or in_parts or bool(self.memory.missing_core())
                    if not self._changed.wait(LOOK_SECONDS if look_again else PROCESS_IDLE_SECONDS):
                        self.process.end_if_idle(PROCESS_IDLE_SECONDS)
                if self._closed:
                    return
                assert next_one is not None
                key, wanted, niceness, whole, spare = next_one
                self._idle = threading.Event() if niceness == IDLE else None
                self._spare = self._idle if spare else None
                needed = key if key in self._needed else None
                lost = 0.0 if whole else self._wanted.bring(key)
                self._busy = True
            problem: JpetsError | None = None
            try:
                if needed is not None:
                    problem = self._bring_needed(needed)
                    if problem is not None:
                        self._failed(needed)
                elif whole:
                    self.compiled += self._whole.bring(key, self._idle)
                else:
                    self._bring(key, wanted, niceness, lost)
            except Exception as error:  # one program fewer; the queries run in others
                log.exception("a program could not be added")
                told = as_told(error)
                if told is None:  # its file may be what is wrong
                    self._store.forget_best(self._replica.family, key)
                self._failed(key)
                problem = told or EngineFailure(f"a program could not be added: {type(error).__name__}")
            with self._changed:
                if needed is not None and not (done := self._needed.pop(needed)).done():
                    done.set_exception(problem) if problem is not None else done.set_result(None)
                self._busy, self._spare, self._idle = False, None, None
                self._changed.notify_all()

    def _next(self) -> _Next | None:
        """One that is to stay, one that keeps rows apart, one that is expected to be missed, what batches miss most, or
        one of the menu."""
        if self._needed:
            return _Next(next(iter(self._needed)), wanted=False, niceness=HURRIED)  # somebody waits for it
        niceness = HURRIED if self._hurried else IDLE
        if (core := next(filter(self._wanted.open, self.memory.missing_core()), None)) is not None:
            return _Next(core, wanted=True, niceness=niceness)
        if (expected := next(iter(self._expected), None)) is not None:
            del self._expected[expected]
            return _Next(expected, wanted=False, niceness=niceness)
        if (missed := self._missed()) is not None:
            return _Next(*missed, niceness)
        if self._menu and not self._hurried:
            return _Next(self._menu.pop(0), wanted=False, niceness=IDLE)
        if self._wanted.rate > QUIET_RATE:
            return None
        spare = self.idle_seconds() >= UNUSED_SECONDS
        key = self._whole.worn(self.compile_seconds, unused=spare)
        return None if key is None else _Next(key, wanted=False, niceness=IDLE, whole=True, spare=spare)

    def _missed(self) -> tuple[ProgramKey, bool] | None:
        """The program that batches miss most, if it is worth compiling and there is, or will be made, room for it;
        whether idle ones leave for it."""
        if (key := self._wanted.most(self.compile_seconds)) is not None:
            return key, True
        key = self._wanted.most(self._least())
        return (key, False) if key is not None and self.memory.has_room(key, evict=False) else None

    @property
    def _hurried(self) -> bool:
        """Whether batches lose much for want of programs."""
        return self._wanted.rate > HURRY_RATE

    def _least(self) -> float:
        """Seconds that batches have lost without a program that is worth compiling."""
        if not self._hurried:
            return self.compile_seconds * (MENU_SHARE if self._menu else IDLE_SHARE)
        early = self._wanted.total < self.compile_seconds
        return self.compile_seconds * (HURRY_SHARE if early else IDLE_SHARE)

    def _failed(self, key: ProgramKey) -> None:
        self.failed += 1
        wait = RETRY_SECONDS * 2 ** min(self._failures[key], MOST_DOUBLINGS)
        self._failures[key] += 1
        with self._changed:
            self._wanted.put_off([key], wait)

    def _bring_needed(self, key: ProgramKey) -> JpetsError | None:
        """Adds a program that is to stay, if it is still missing. Returns the error that keeps it from coming, or
        None."""
        if self.memory.has(key):
            return None
        try:
            program = self._load(key, HURRIED)
        except OutOfSpace as full:
            return full
        if program is None:
            return EngineFailure("a program could not be compiled; try again later")
        gone = self.memory.make_room(program, evict=True) or ()  # it comes in any case
        with self._changed:
            self._wanted.put_off(gone, IDLE_SECONDS)
        self._add(program)
        self._failures.pop(key, None)
        self.compiled += 1
        return None

    def _load(self, key: ProgramKey, niceness: int, unless: threading.Event | None = None) -> Program | None:
        """From the store, or compiled first; None where that could not be had, or was given up by ``unless``."""
        family = self._replica.family
        if (stored := self._store.load_best(family, key)) is not None:
            return stored
        seconds = self.process.compile(family, key, niceness=niceness, unless=unless)
        if seconds is None:
            return None
        self._timed += 1
        self.compile_seconds += (seconds / (os.cpu_count() or 1) - self.compile_seconds) / self._timed
        return self._store.load(family, key)

    def _bring(self, key: ProgramKey, wanted: bool, niceness: int, lost: float) -> None:
        """Adds a program if it is still missing and there is room; without room none is compiled. Idle programs leave
        only for a wanted one."""
        if self.memory.has(key):
            return
        gone: list[ProgramKey] | None = None
        if self.memory.has_room(key, evict=wanted):
            try:
                program = self._load(key, niceness, self._idle)
            except OutOfSpace as full:
                log.warning("a program must wait: %s", full)
            else:
                if program is None:
                    if self._idle is not None and self._idle.is_set():
                        with self._changed:  # for one that somebody waits for: its turn comes again
                            self._wanted.give_back(key, max(lost, self.compile_seconds * wanted))
                            self._menu[:0] = [] if lost or wanted else [key]
                    elif not self._closed:
                        log.warning("a program was not compiled, or not kept; it is tried again later")
                        self._failed(key)
                    return
                gone = self.memory.make_room(program, evict=wanted)
                with self._changed:
                    self._wanted.put_off(gone or (), IDLE_SECONDS)
                if gone is not None and not self._closed:
                    self._add(program)
                    self.memory.added(program)
                    self._failures.pop(key, None)
                    self.compiled += 1
                    if wanted or niceness == HURRIED:
                        with self._changed:
                            self._wanted.brought(key)
        if gone is None:
            if key in self.memory.missing_core():
                log.warning("there is no room for a program without which new classes run apart; it is tried again")
                self._failed(key)
                return
            with self._changed:
                self._wanted.put_off([key], IDLE_SECONDS)
                if not wanted:  # the rest comes only if batches miss it
                    self._menu.clear()
                    self._expected.clear()
