"""Measures the figures of classes and sizes while an engine serves: one short batch at a time, when nothing else runs
or waits.

The programs that are timed are compiled by the process that compiles in the background, at low priority. They are timed
here, by the owner of the device, whose moments without work are free of charge: a query that comes meanwhile waits for
one short batch at most.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.costs.batch_limits import MANY_TOKENS
from jpets.engine.costs.bench import Bench, Case, bench_bytes
from jpets.engine.costs.coarse_profile import LENGTHS, priced, typical
from jpets.engine.costs.figures import ClassFigures, Figures
from jpets.engine.costs.live_profile import LiveProfile
from jpets.engine.device.memory import DeviceMemory
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.errors import SHUTTING_DOWN, EngineFailure, OutOfSpace, Saturated
from jpets.free_memory import return_free_memory
from jpets.scheduling.costs.measured_profile import PackedPoint

log = logging.getLogger(__name__)

TOKENS = 512
"""Most tokens of a timed batch with deltas: it takes about as long as that of a single long text."""
MOST_SIZE = MANY_TOKENS
"""Most tokens of a timed batch without deltas: no start takes more by itself."""
MOST_SECONDS = 0.1
"""Seconds that one of them may take: a query that comes meanwhile waits for its end."""
ROUNDS = 7
QUIET = 0.05
"""Seconds without any work before a batch is timed: gaps within a burst of queries are shorter."""
REST = 8.0
"""Times as long as a timed batch took, nothing is timed after it: few queries come while one runs."""
MOST_REST = 0.1
"""The same in seconds, at most: a heavy class has nearly two hundred timed batches, and all classes of a usual server
are measured within minutes."""
LOOK_AGAIN = 5.0
"""Seconds between looks for classes that came since."""
TRY_AGAIN = 60.0
"""Seconds after which what could not be measured is tried again; sizes, and what cannot be compiled, each further time
twice as long, up to ``MOST_WAIT``."""
MOST_WAIT = 3600.0


Run = tuple[Case, Callable[[], object]]
"""A case, and what runs its batch once."""


class _Prepared(NamedTuple):
    """A class, the batches to time with their programs, and what makes figures of their times."""

    key: ClassKey
    cases: Sequence[tuple[Case, Program]]
    found: Callable[[], ClassFigures]


class IdleMeasurement:
    """For one replica, in a thread of its own. ``compile`` gives a program of another family, or None. ``idle`` gives
    the seconds since the device had work, 0 while it has. ``used`` tells how many tasks each class has: classes of
    tasks come first. ``wait`` waits for staged work."""

    def __init__(
        self,
        replica: Replica,
        profile: LiveProfile,
        memory: DeviceMemory,
        compile: Callable[[Family, ProgramKey], Program | None],
        idle: Callable[[], float],
        used: Callable[[], Mapping[ClassKey, int]],
        wait: Callable[[Future[None]], None],
    ) -> None:
        self._replica = replica
        self._profile = profile
        self._memory = memory
        self._compile = compile
        self._idle = idle
        self._used = used
        self._wait = wait
        self._not_before: dict[ClassKey, float] = {}
        self._waits: dict[ClassKey, float] = {}
        """Seconds after which a class that could not be compiled is tried again."""
        self._sizes_not_before, self._sizes_wait = 0.0, TRY_AGAIN
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-costs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                if missing := self._missing():
                    self._with_bench(missing, partial(self._measure, missing))
                elif not self._profile.sized and self._sizes_not_before <= time.monotonic():
                    self._sizes_not_before = time.monotonic() + self._sizes_wait
                    self._sizes_wait = min(2 * self._sizes_wait, MOST_WAIT)
                    self._profile.reload()  # another server, or another device's engine, may have measured them
                    if not self._profile.sized:
                        self._with_bench([], self._measure_sizes)
            except Saturated:  # the engine closes, or the device makes no progress for a while
                self._put_off(self._missing())
            except OutOfSpace as full:
                log.warning("costs cannot be measured for now: %s", full)
                self._put_off(self._missing())
            except Exception:  # figures stay coarse
                log.exception("costs could not be measured")
                self._put_off(self._missing())
            self._closed.wait(LOOK_AGAIN)

    def _missing(self) -> list[ClassKey]:
        """Classes to measure now, those with most tasks first."""
        now, used, coarse = time.monotonic(), self._used(), self._profile.coarse
        wanted = [key for key in priced(self._replica.classes) if str(key) in coarse]
        return sorted(
            (key for key in wanted if self._not_before.get(key, 0.0) <= now), key=lambda key: (-used.get(key, 0), key)
        )

    def _put_off(self, keys: list[ClassKey]) -> None:
        self._not_before.update(dict.fromkeys(keys, time.monotonic() + TRY_AGAIN))

    def _with_bench(self, keys: Sequence[ClassKey], measure: Callable[[Bench], None]) -> None:
        """All that measuring takes in memory is gone at the end. Raises ``OutOfSpace`` before any of it is taken."""
        measured = dataclasses.replace(self._replica.family, slots=tuple((key, 1) for key in keys))
        taken = bench_bytes(measured, self._replica.mesh)
        self._memory.measuring = taken
        try:
            if not self._memory.holds(self._replica.programs):
                raise OutOfSpace(f"measuring costs takes {taken / 1e6:.0f} MB of device memory, and there is no room")
            measure(Bench(measured, self._replica.mesh, TOKENS))
        finally:
            self._memory.measuring = 0
            return_free_memory()

    def _measure(self, keys: Sequence[ClassKey], bench: Bench) -> None:
        """All of these but those that cannot be compiled, which are put off."""
        bare: dict[ProgramKey, Program] = {}
        with ThreadPoolExecutor(1, "jpets-costs-next") as beside:  # compiles for the next class meanwhile
            coming = beside.submit(self._prepared, keys[0], bench, bare)
            for key, following in zip(keys, [*keys[1:], None], strict=True):
                try:
                    prepared = coming.result()
                except EngineFailure as error:
                    log.warning("costs could not be measured: %s", error.message, extra={"class": str(key)})
                    wait = self._waits.get(key, TRY_AGAIN)
                    self._not_before[key] = time.monotonic() + wait
                    self._waits[key] = min(2 * wait, MOST_WAIT)
                    prepared = None
                if following is not None:
                    coming = beside.submit(self._prepared, following, bench, bare)
                if prepared is not None:
                    self._measure_class(prepared, bench)

    def _measure_sizes(self, bench: Bench) -> None:
        """Packed shapes without deltas, small ones first, up to one that takes too long or has no room: how the cost of
        a token falls with their number."""
        runs, found = list[Run](), list[tuple[Bucket, Callable[[], float]]]()
        longest = min(LENGTHS[-1], bench.family.config.max_positions)
        sizes = [1 << power for power in range(6, MOST_SIZE.bit_length())]
        for bucket in (Bucket(tokens, groups) for tokens, groups in typical(sizes, longest)):
            seconds, case = bench.bare(bucket), bench.case(bucket)
            program = self._compiled(bench, case.program)
            if not self._memory.holds([*self._replica.programs, program]):
                if not runs:
                    raise OutOfSpace("there is no device memory for a batch to measure")
                break
            run = bench.run_of(case, program)
            self._first_run(run)
            self._time(case, run)
            runs.append((case, run))
            found.append((bucket, seconds))
            if 2 * case.seconds[0] > MOST_SECONDS:
                break
        self._time_all(runs, ROUNDS - 1)
        points = tuple(PackedPoint(bucket.tokens, bucket.groups, seconds()) for bucket, seconds in found)
        self._profile.add(Figures(packed=points))
        log.info("costs of sizes were measured", extra={"tokens": points[-1].tokens})

    def _prepared(self, key: ClassKey, bench: Bench, bare: dict[ProgramKey, Program]) -> _Prepared | None:
        """None where another server, or another device's engine, has measured the class. ``bare`` are programs without
        classes, which each class is compared with. One class at a time."""
        self._profile.reload()
        if str(key) not in self._profile.coarse:
            return None
        bench.cases.clear()
        found = bench.of_class(key)
        programs = dict(bare)
        for wanted in dict.fromkeys(case.program for case in bench.cases.values()):
            if wanted in programs:
                continue
            programs[wanted] = self._compiled(bench, wanted)
            if not wanted.variant.classes():
                bare[wanted] = programs[wanted]
        return _Prepared(key, [(case, programs[case.program]) for case in bench.cases.values()], found)

    def _compiled(self, bench: Bench, key: ProgramKey) -> Program:
        """Raises ``EngineFailure``."""
        program = self._compile(bench.family, key)
        if program is None:
            raise EngineFailure("a program to measure could not be compiled")
        return program

    def _measure_class(self, prepared: _Prepared, bench: Bench) -> None:
        runs = [(case, bench.run_of(case, program)) for case, program in prepared.cases]
        for _, run in runs:
            self._first_run(run)
        self._time_all(runs, ROUNDS)
        self._profile.add(Figures(classes={str(prepared.key): prepared.found()}))
        log.info("costs of a class were measured", extra={"class": str(prepared.key)})

    def _first_run(self, run: Callable[[], object]) -> None:
        """It takes several times as long as later ones. Several devices must all start the same runs in the same order:
        the owner's."""
        if len(self._replica.mesh.devices) == 1:
            run()
        else:
            self._wait(self._replica.staging.stage(run))

    def _time_all(self, runs: Sequence[Run], rounds: int) -> None:
        for _ in range(rounds):
            for case, run in runs:
                self._time(case, run)

    def _time(self, case: Case, run: Callable[[], object]) -> None:
        def timed() -> None:
            if self._idle() > 0:  # else a query came in between
                start = time.perf_counter()
                run()
                case.seconds.append(time.perf_counter() - start)

        count = len(case.seconds)
        while len(case.seconds) == count:
            while (quiet := self._idle()) < QUIET:
                if self._closed.wait(QUIET - quiet):
                    raise Saturated(SHUTTING_DOWN)
            self._wait(self._replica.staging.stage(timed))
        self._closed.wait(min(MOST_REST, REST * case.seconds[-1]))
