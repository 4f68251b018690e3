"""Residency: tasks come to the device when queries ask for them, and leave it for others (HMI sections 5.2 and 6.2).

Three tiers: what ``Entry.load`` reads, a bounded cache of host memory, the slots of the device's banks. One thread
reads and lowers tasks, finds slots and stages the writes, which the owner thread does between two batches; so what
waiting queries need travels while earlier batches run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica, SlotContents
from jpets.engine.queue.answers import LATE, Answers
from jpets.engine.queue.pending import WINDOW, Pending, PendingQueue
from jpets.engine.residency.loading import HostCache, LoadedTask, TaskLoader
from jpets.engine.results.results import as_refusal
from jpets.engine.tasks.entries import Entry, Resident, Tier
from jpets.engine.tasks.table import TaskTable
from jpets.errors import EngineFailure, JpetsError, NotFound, OutOfSpace, Saturated
from jpets.types import Query

log = logging.getLogger(__name__)

TOGETHER = 8
"""Tasks whose slots are written between the same two batches, at most."""
COMING = 32
"""Tasks that may be on their way to the device at once."""
ON_THE_WAY = 1 / 8
"""Their part of the host memory, beside what is kept there. One may always come."""
POLL = 0.001
"""Seconds between looks at a device that nobody may ask for more while it computes."""
STARVING = 0.25
"""Seconds after which a task without a slot gets one of those that are always in use."""
BYTES_PER_SECOND = 1e9
"""At which tasks are taken to go from host memory to the device, to say what it costs to bring one."""
PAUSE = 0.1
"""Seconds before the next try after something failed that nobody thought of."""


@dataclass(frozen=True)
class Coming:
    """A task on its way to the device, as it was at that turn of its entry."""

    entry: Entry
    resident: Resident
    turn: int
    loaded: LoadedTask


Failures = Mapping[Entry, Exception]
"""Why tasks could not be written."""


class Residency:
    """Brings the tasks of cold queries, the most urgent first. ``row`` makes a query's row for a task that came.

    Without ``prefetch`` a task is brought only once there is nothing else to compute (for comparison).
    """

    def __init__(
        self,
        tasks: TaskTable,
        pending: PendingQueue,
        answers: Answers,
        replica: Replica,
        loader: TaskLoader,
        row: Callable[[Query, Resident], Row],
        write: Callable[[SlotContents], None],
        host_bytes: float,
        *,
        prefetch: bool = True,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.host = HostCache(host_bytes * (1 - ON_THE_WAY))
        self.counts: Counter[str] = Counter()
        """Tasks brought from ``host`` or by ``load``, that ``failed``, and the ``bytes`` that were written."""
        self._tasks = tasks
        self._pending = pending
        self._answers = answers
        self._replica = replica
        self._loader = loader
        self._row = row
        self._write = write
        self._prefetch = prefetch
        self._busy = busy
        self._coming: dict[Entry, int] = {}
        """What is on its way to the device, and its bytes."""
        self._most_coming = host_bytes * ON_THE_WAY
        self._arrived: deque[tuple[Sequence[Coming], Failures]] = deque()
        self._wanted: deque[Entry] = deque()
        """To be brought before anybody asks for them."""
        self._warming: set[Entry] = set()
        """Those of them that are on their way."""
        self._full: set[ClassKey] = set()
        """Classes without a free slot for them."""
        self._look = False
        """Something changed since the last look: a cold query came, a task has no queries any more."""
        self._thread = threading.Thread(target=self._work, name="jpets-residency", daemon=True)
        self._starved = False
        """Some task found no slot at the last look."""
        self._looked = 0.0
        tasks.on_idle = self._idle

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread; the pending queue must have been closed."""
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def live(self) -> bool:
        return self._thread.is_alive()

    def warm(self, entries: Iterable[Entry]) -> None:
        """Brings these, in their order, as long as there are free slots and no query waits for another task."""
        with self._pending.changed:
            self._full.clear()
            self._wanted.extend(entries)
            self._pending.changed.notify_all()

    @property
    def warming(self) -> int:
        """How many of those are not there yet."""
        return len(self._wanted) + len(self._warming)

    def tier(self, entry: Entry) -> Tier:
        """Where a task is now."""
        if entry.resident is not None:
            return "device"
        return "host" if entry in self.host else "repository"

    @property
    def host_bytes(self) -> int:
        """Of host memory: the tasks that are kept there, and those that are on their way."""
        coming = self._coming.copy()
        return self.host.nbytes + sum(size for entry, size in coming.items() if entry not in self.host)

    def tiers(self) -> dict[Tier, int]:
        """How many tasks each tier holds; the last has them all."""
        return {"device": len(self._tasks.all()), "host": len(self.host), "repository": len(self._tasks)}

    def wake(self) -> None:
        """A cold query came."""
        with self._pending.changed:
            self._look = True
            self._pending.changed.notify_all()

    def _idle(self) -> None:
        """A slot may have become free."""
        if self._starved:
            self.wake()

    def _work(self) -> None:
        while True:
            with self._pending.changed:
                while not (self._arrived or self._pending.closed or self._should_look() or self._should_warm()):
                    self._pending.changed.wait(self._patience())
                if self._pending.closed:
                    return
                self._look = False
                self._starved = True  # until it is known that everybody finds a slot: none may become free unheard
            self._answers.fail(self._pending.expire(time.monotonic()), LATE)
            try:
                while self._arrived:
                    self._admit(*self._arrived.popleft())
                if self._may_bring():
                    self._bring()
                else:
                    self._look = True
                if self._should_warm():
                    self._warm()
            except Exception:  # whatever it was, queries must not wait for ever
                log.exception("tasks could not be brought")
                time.sleep(PAUSE)
                self._look = True

    def _should_look(self) -> bool:
        if not self._pending.cold:
            return False
        deadline = self._pending.earliest_deadline()
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            return True
        if self._starved and now - self._looked >= STARVING:
            return True
        return self._look and self._may_bring()

    def _should_warm(self, batch: Sequence[Coming] = ()) -> bool:
        return bool(self._wanted) and not self._pending.cold and self._may_come(batch)

    def _may_come(self, batch: Sequence[Coming]) -> bool:
        """Whether one more may be on its way, beside those that are and ``batch``."""
        size = sum(self._coming.values()) + sum(coming.loaded.nbytes for coming in batch)
        return len(self._coming) + len(batch) < COMING and size <= self._most_coming

    def _may_bring(self) -> bool:
        return self._prefetch or not (self._pending.ready or self._coming or self._busy())

    def _patience(self) -> float | None:
        """Seconds until there is something to do that nobody says: a query is late, or starves, or the device idle."""
        if not self._pending.cold:
            return None
        if not self._prefetch:
            return POLL
        deadline = self._pending.earliest_deadline()
        waits = [STARVING] if self._starved else []
        if deadline is not None:
            waits.append(max(0.0, deadline - time.monotonic()))
        return min(waits, default=None)

    def _bring(self) -> None:
        """Stages the writes of the most urgent tasks that are not on their way, as far as there are slots."""
        self._looked = time.monotonic()
        full, starving = set[ClassKey](), Counter[ClassKey]()
        batch: list[Coming] = []
        try:
            for entry, since in self._pending.absent(WINDOW, self._coming).items():
                if self._arrived or self._pending.closed or not self._may_come(batch):
                    break  # an arrival is looked at again
                if (resident := self._tasks.hold(entry, 1)) is not None:  # it came after these had been submitted
                    self._serve(entry, resident)
                    continue
                if not self._tasks.known(entry):
                    self._refuse(entry, NotFound(f"unknown task {entry.task!r}"))
                    continue
                if full.isdisjoint(entry.keys or ()) and not (full and entry.keys is None):
                    try:
                        placed = self._place(entry)
                    except OutOfSpace as error:
                        keys = entry.keys or ()
                        if self._tasks.hopeless(keys):
                            self._refuse(entry, error)
                            continue
                        full.update(keys)
                    else:
                        batch += [placed] if placed else []
                        if len(batch) == TOGETHER:
                            self._stage(batch)
                            batch = []
                        continue
                if entry.keys and self._looked - since > STARVING:
                    starving.update(entry.keys)
                    self._tasks.drain(entry.keys, entry.tenant, starving)
        finally:
            if batch:
                self._stage(batch)
        self._starved = bool(full)

    def _warm(self) -> None:
        """Stages the next of those that nobody has asked for yet."""
        batch: list[Coming] = []
        try:
            while self._should_warm(batch) and len(batch) < TOGETHER and not self._arrived:
                entry, placed = self._wanted[0], None
                self._warming.add(entry)  # before it leaves the others: ``warming`` must not leave it out
                self._wanted.popleft()
                try:
                    if self._may_warm(entry):
                        placed = self._place(entry, evict=False)
                except OutOfSpace:
                    self._full.update(entry.keys or ())
                finally:
                    if placed is None:
                        self._warming.discard(entry)
                batch += [placed] if placed else []
        finally:
            if batch:
                self._stage(batch)

    def _may_warm(self, entry: Entry) -> bool:
        absent = entry.resident is None and entry not in self._coming and self._tasks.known(entry)
        return absent and self._full.isdisjoint(entry.keys or ())

    def _place(self, entry: Entry, *, evict: bool = True) -> Coming | None:
        """The task with slots of its own; None where it cannot be read, and its queries have been told why.

        Raises ``OutOfSpace`` where there are no slots now.
        """
        turn, slots = entry.turn, dict[ClassKey, int]()
        if entry.keys:  # before it is read, which may be for nothing
            slots = self._tasks.reserve(entry.keys, entry.tenant, evict=evict)
        loaded = self._loaded(entry, turn)
        if loaded is None or loaded.contents.keys() != slots.keys():
            self._tasks.release(slots)
            if loaded is None:
                return None
            entry.keys = tuple(loaded.contents)
            slots = self._tasks.reserve(entry.keys, entry.tenant, evict=evict)
        return Coming(entry, loaded.resident(entry.tenant, slots, entry.version, entry), turn, loaded)

    def _loaded(self, entry: Entry, turn: int) -> LoadedTask | None:
        """The task in host memory; None where it cannot be had, and its queries have been told."""
        loaded = self.host.get(entry, turn)
        if loaded is not None:
            self.counts["host"] += 1
            entry.cost = loaded.nbytes / BYTES_PER_SECOND
            return loaded
        began = time.monotonic()
        try:
            loaded = self._loader.load(entry.load(), self._tasks).outlined()
        except Exception as error:  # a damaged file, a blob that disappeared: its task alone cannot be served
            if not isinstance(error, NotFound):
                log.exception("a task could not be loaded", extra={"task": entry.task})
            if entry.turn == turn:
                entry.keys = None  # what may not come must not make another one leave
            self._refuse(entry, error, turn)
            return None
        self.counts["load"] += 1
        entry.cost = time.monotonic() - began + loaded.nbytes / BYTES_PER_SECOND
        self.host.keep(entry, turn, loaded)
        if not self._tasks.known(entry):  # it was removed meanwhile
            self.host.drop(entry)
        return loaded

    def _refuse(self, entry: Entry, error: BaseException, turn: int | None = None) -> None:
        """Tells a task's queries why it does not come; not those of a version that came after ``turn``."""
        if turn is not None and entry.turn != turn:
            self._look = True
            return
        told = error if isinstance(error, JpetsError) else EngineFailure(f"task {entry.task!r} could not be loaded")
        self.counts["failed"] += 1
        self._look = True  # others may have stood behind them
        self._answers.fail(self._pending.remove(self._pending.waiting_for(entry)), told)

    def _stage(self, batch: Sequence[Coming]) -> None:
        failures: dict[Entry, Exception] = {}

        def write() -> None:
            for coming in batch:
                slots, contents = coming.resident.slots, coming.loaded.contents
                try:
                    self._write({key: (slots[key], arrays) for key, arrays in contents.items()})
                except Exception as error:  # it costs no other task of the batch
                    log.exception("a task could not be written", extra={"task": coming.entry.task})
                    failures[coming.entry] = error

        try:
            done = self._replica.stage(write)
        except Saturated:  # the engine closes; who waits hears it from there
            return
        self.counts["bytes"] += sum(coming.loaded.nbytes for coming in batch)
        self._coming.update((coming.entry, coming.loaded.nbytes) for coming in batch)

        def finished(done: Future[None]) -> None:
            with self._pending.changed:
                self._arrived.append((batch, failures))
                self._pending.changed.notify_all()

        done.add_done_callback(finished)

    def _admit(self, came: Sequence[Coming], failures: Failures) -> None:
        """What was written is shown to queries; where a write failed, its queries hear why."""
        for coming in came:
            entry, resident = coming.entry, coming.resident
            self._coming.pop(entry, None)
            self._warming.discard(entry)
            if (error := failures.get(entry)) is not None:
                self._tasks.release(resident.slots)
                self._refuse(entry, error, coming.turn)
            elif self._tasks.bring(resident, coming.turn) and (held := self._tasks.hold(entry, 1)) is not None:
                self._serve(entry, held)

    def _serve(self, entry: Entry, resident: Resident) -> None:
        """The cold queries of a task that is there become ready. ``resident`` is held for one query meanwhile."""
        try:
            rows: list[tuple[Pending, Row]] = []
            for pending in self._pending.waiting_for(entry):
                assert pending.query is not None
                try:
                    rows.append((pending, self._row(pending.query, resident)))
                except Exception as error:  # noqa: BLE001 (one malformed query must not keep the others waiting)
                    self._answers.fail(self._pending.remove([pending]), as_refusal(error))
            held = self._tasks.hold(entry, len(rows)) if rows else None
            if held is resident:
                moved = self._pending.warm(rows, resident)
                if len(moved) < len(rows):
                    self._tasks.done(resident, len(rows) - len(moved))
            elif held is not None:  # another version came
                self._tasks.done(held, len(rows))
        finally:
            self._look = True  # others may have stood behind them
            self._tasks.done(resident)
