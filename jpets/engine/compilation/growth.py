"""Classes that come after the start: first the programs that take any row of them, then the better ones for batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from jpets.deltas.bank import tightest
from jpets.deltas.protocol import ClassKey
from jpets.engine.compilation.background import BackgroundCompiler
from jpets.engine.compilation.core import Core
from jpets.engine.compilation.readiness import Programs
from jpets.engine.device.classes import class_parts, covered
from jpets.engine.device.memory import WORKING_SHARE, DeviceMemory, banks_bytes, fit_slots
from jpets.engine.device.replica import Generation, Replica
from jpets.engine.programs.mappings import spare_mappings
from jpets.engine.programs.program import ProgramKey
from jpets.engine.tasks.table import TaskTable
from jpets.errors import SHUTTING_DOWN, EngineFailure, OutOfSpace, Saturated

log = logging.getLogger(__name__)

LEAST_SLOTS = 2
"""Slots of a new class: one for a task, and the empty one."""


class Growth:
    """Makes an engine ready for more classes, one request after the other, beside its traffic.

    A class is open to tasks once two programs take any mixture of all classes. Its rows run in those, apart from other
    rows, until it is used and the core programs of all classes are there. ``wait`` waits for staged work.
    """

    def __init__(
        self,
        replica: Replica,
        tasks: TaskTable,
        memory: DeviceMemory,
        programs: Programs,
        compiler: BackgroundCompiler | None,
        cores: Core,
        slots: int,
        wait: Callable[[Future[None]], None],
    ) -> None:
        self._replica = replica
        self._tasks = tasks
        self._memory = memory
        self._programs = programs
        self._compiler = compiler
        self._cores = cores
        self._takers: Sequence[ProgramKey] = ()
        """Programs for any mixture of all classes of the latest opening."""
        self._slots = slots
        self._wait = wait
        self._lock = threading.Lock()
        self._promoted = frozenset(replica.generations[-1].classes)
        self._workers = ThreadPoolExecutor(1, "jpets-classes")
        self._coming: dict[frozenset[ClassKey], Future[None]] = {}
        """What is being made: thousands of tasks may ask for one class, and it may fail."""
        self._closed = False

    def want(self, keys: Iterable[ClassKey]) -> Future[None]:
        """Makes these classes ready; done at once if they are ready. The future raises ``OutOfSpace`` where the
        device has no room for them, ``EngineFailure``, ``Saturated`` where the engine closes first."""
        missing = self._missing(keys)
        if not missing:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        with self._lock:
            self._coming = {classes: coming for classes, coming in self._coming.items() if not coming.done()}
            if (coming := self._coming.get(frozenset(missing))) is not None:
                return coming
            self._tasks.fitting.expect(missing)
            try:
                asked = self._workers.submit(self._add, missing)
            except RuntimeError:
                raise Saturated(SHUTTING_DOWN) from None
            self._coming[frozenset(missing)] = asked
            return asked

    def used(self, keys: Iterable[ClassKey]) -> None:
        """Tasks of these classes are there: batches are to mix them with all others."""
        if self._promoted.issuperset(keys) or self._compiler is None:
            return
        with self._lock:
            classes = self._replica.opened
            if self._promoted == classes:
                return
            self._promoted = classes
            generation = Generation(classes, self._cores.programs(sorted(classes)))
            self._replica.generations = (*self._replica.generations, generation)
            self._compiler.offer(())  # it looks for the core

    def close(self) -> None:
        self._closed = True
        self._workers.shutdown(wait=True)

    def _missing(self, keys: Iterable[ClassKey]) -> list[ClassKey]:
        """The classes that no present class takes, without those that another class of the list takes."""
        absent = {key for key in keys if tightest(key, self._tasks.classes) is None}
        return list(dict.fromkeys(covered(absent).values()))

    def _add(self, wanted: Sequence[ClassKey]) -> None:
        keys = self._missing(wanted)  # some may be there by now
        try:
            if keys and self._closed:
                raise Saturated(SHUTTING_DOWN)
            if keys:
                self._open(keys)
        except (EngineFailure, Saturated):  # whoever asks again may get them
            raise
        except BaseException:
            self._tasks.fitting.expect_no_more(wanted)
            raise
        self._tasks.fitting.expect_no_more(wanted)

    def _open(self, keys: Sequence[ClassKey]) -> None:
        absent = [key for key in keys if key not in self._replica.banks]  # an earlier try may have added some
        spare_mappings()  # the programs will be loaded; banks without them would stay
        if absent:
            self._stage(partial(self._replica.add_banks, self._fitting(absent)))
        self._memory.banks = self._replica.bank_bytes()  # an earlier try may have made some after it was given up
        classes = frozenset(self._tasks.classes).union(keys)
        takers = self._cores.takers(sorted(classes))
        self._exchange((), takers)
        try:
            for program in takers:
                self._bring(program)
        except BaseException:
            self._exchange(takers)
            raise
        self._replica.opened = classes
        self._tasks.open({key: self._replica.banks[key].slots for key in keys})
        self._exchange(self._takers, takers)
        self._takers = takers
        log.info("classes were added", extra={"classes": list(map(str, keys))})

    def _exchange(self, leaving: Iterable[ProgramKey], staying: Iterable[ProgramKey] = ()) -> None:
        """Of those that stay some may be there since an opening that failed."""
        if self._compiler is not None:
            self._compiler.memory.free(leaving)
            self._compiler.memory.keep(staying)

    def _fitting(self, keys: Sequence[ClassKey]) -> dict[ClassKey, int]:
        """Slots of each class that the device has room for. Raises ``OutOfSpace``."""
        family, mesh = self._replica.family, self._replica.mesh
        every = class_parts({*self._replica.classes, *keys}, family.config, family.dtype, mesh)
        wanted = {key: self._slots * every[key] for key in keys}
        least, used = dict.fromkeys(keys, LEAST_SLOTS), self._memory.use(self._replica.programs).total
        try:
            return fit_slots(least, wanted, every, family.config, family.dtype, used, self._memory.limit, mesh)
        except OutOfSpace:
            each = banks_bytes(dict.fromkeys(keys, 1), family.config, family.dtype, mesh)
            left = max(0.0, self._memory.limit * (1 - WORKING_SHARE) - used)
            log.warning("a device has %.1f MB left, too little for a task of a new shape", left / 1e6)
            raise OutOfSpace(
                f"tasks of shape {list(map(str, keys))} take {each / 1e6:.1f} MB each, more than the device has left; "
                "raise --device-memory-gb or allow fewer slots (--max-slots)"
            ) from None

    def _stage(self, action: Callable[[], None]) -> None:
        """Several devices must all start the same work in the same order: the owner's."""
        if len(self._replica.mesh.devices) == 1:
            action()
        else:
            self._wait(self._replica.staging.stage(action))

    def _bring(self, key: ProgramKey) -> None:
        if self._closed:
            raise Saturated(SHUTTING_DOWN)
        if self._replica.has_program(key):
            return
        if self._compiler is not None:
            self._compiler.need(key).result()
        else:
            self._programs.add(self._programs.get(key))
