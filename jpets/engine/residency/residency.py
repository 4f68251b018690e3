"""Residency: tasks come to the device when queries ask for them, and leave it for others (HMI sections 5.2 and 6.2).

Three tiers: the source that ``Entry.load`` reads, a bounded cache in host memory, the slots of the device's banks. One
thread decides which tasks come, has them read and lowered by others (``Fetcher``), and stages the writes, which the
owner thread makes between two batches (``Delivery``). So tasks for waiting queries travel while earlier batches run,
and a source that is slow for one task keeps no other one waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jpets.deltas.protocol import ClassKey
from jpets.engine.queue.answers import LATE, Answers
from jpets.engine.queue.pending_queue import WINDOW, PendingQueue
from jpets.engine.residency.delivering import Coming, Delivery
from jpets.engine.residency.fetching import Fetcher
from jpets.engine.residency.warming import Warming
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.table import TaskTable
from jpets.errors import JpetsError, NotFound, OutOfSpace, Saturated

log = logging.getLogger(__name__)

TOGETHER = 8
"""Most tasks that are written between the same two batches."""
ON_THE_WAY = 1 / 8
"""Part of the host memory for tasks on their way to the device, besides the cached ones."""
POLL = 0.001
"""Seconds between looks at a device that must not get more work while it computes."""
STARVING = 0.25
"""Seconds after which a task without a slot takes the slot of a task that is always in use."""
LONGEST_WAIT = 3600.0
"""Seconds that it sleeps at a time: a deadline may be further away than a wait may be long."""
PAUSE = 0.1
"""Seconds before the next try after an unexpected failure."""


class Residency:
    """Brings the tasks of cold queries, the most urgent first.

    Without ``prefetch`` a task is brought only once there is nothing else to compute (for comparison).

    It has more than 20 methods, as one thread does all that decides which tasks come.
    """

    def __init__(
        self,
        tasks: TaskTable,
        pending: PendingQueue,
        answers: Answers,
        fetcher: Fetcher,
        delivery: Delivery,
        *,
        prefetch: bool = True,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.host = fetcher.host
        self.counts = delivery.counts
        self._tasks = tasks
        self._pending = pending
        self._answers = answers
        self._fetcher = fetcher
        self._delivery = delivery
        self._prefetch = prefetch
        self._busy = busy
        self._warming = Warming(tasks)
        self._look = False
        """Something changed since the last look: a cold query came, a task has no more queries."""
        self._thread = threading.Thread(target=self._work, name="jpets-residency", daemon=True)
        self._starved = False
        """Some task found no slot at the last look."""
        self._looked = 0.0
        tasks.slots.on_idle = self._idle
        fetcher.on_read = fetcher.readers.on_none_waiting = self._notify

    def start(self) -> None:
        self._fetcher.readers.start()
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread, not for a task that is being read; the pending queue must have been closed."""
        self._fetcher.readers.close()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def live(self) -> bool:
        return self._thread.is_alive()

    @property
    def coming(self) -> int:
        """Tasks on their way to the device."""
        return len(self._delivery.coming)

    def warm(self, entries: Iterable[Entry]) -> None:
        """Brings these tasks, in their order, while there are free slots and no query waits for another task."""
        with self._pending.changed:
            self._warming.add(entries)
            self._pending.changed.notify_all()

    @property
    def warming(self) -> int:
        """How many tasks of ``warm`` are not there yet."""
        return len(self._warming)

    def tier(self, entry: Entry) -> Tier:
        """Where a task is now."""
        if entry.resident is not None:
            return "device"
        return "host" if entry in self.host else "repository"

    @property
    def host_bytes(self) -> int:
        """Host memory of cached tasks and of tasks on their way."""
        coming = self._delivery.coming.copy()
        return self.host.nbytes + sum(size for entry, size in coming.items() if entry not in self.host)

    def tiers(self) -> dict[Tier, int]:
        """How many tasks each tier holds; the last one has them all."""
        return {"device": len(self._tasks.all()), "host": len(self.host), "repository": len(self._tasks)}

    def wake(self) -> None:
        """A cold query came."""
        with self._pending.changed:
            self._look = True
            self._pending.changed.notify_all()

    def _notify(self) -> None:
        with self._pending.changed:
            self._pending.changed.notify_all()

    def _idle(self) -> None:
        """A slot may have become free."""
        if self._starved:
            self.wake()

    def _work(self) -> None:
        pending, delivery, read = self._pending, self._delivery, self._fetcher.read
        while True:
            with pending.changed:
                while not (read or delivery.arrived or pending.closed or self._should_look() or self._should_warm()):
                    pending.changed.wait(self._patience())
                if pending.closed:
                    return
                anew = bool(delivery.arrived) or self._should_look()
                self._look = delivery.look_again = False
                self._starved = True  # until every task is known to find a slot: a slot must not become free unnoticed
            self._answers.fail(pending.expire(time.monotonic()), LATE)
            try:
                self._admit()
                self._stage_read()
                if not self._may_bring():
                    self._look = True
                elif anew or not self._fetcher.readers.busy:
                    self._bring()
                if self._should_warm():
                    self._warm()
            except Exception:  # after any error queries must not wait for ever
                log.exception("tasks could not be brought")
                time.sleep(PAUSE)
                self._look = True

    def _admit(self) -> None:
        """Shows the written tasks to queries."""
        while self._delivery.arrived:
            batch, failures = self._delivery.arrived.popleft()
            for came in batch:
                self._warming.settled(came.entry)
                self._delivery.admit(came, failures.get(came.entry))

    def _stage_read(self) -> None:
        """Stages the writes of the tasks that have been read."""
        batch: list[Coming] = []
        try:
            for entry, placed in self._fetcher.placed():
                if placed is None:
                    self._warming.settled(entry)
                else:
                    batch.append(placed)
        finally:
            if batch:
                self._delivery.stage(batch)

    def _should_look(self) -> bool:
        deadline = self._pending.earliest_deadline()
        now = time.monotonic()
        if deadline is not None and deadline <= now:  # also of a query that the owner of a hanging device cannot answer
            return True
        if not self._pending.cold:
            return False
        if self._starved and now - self._looked >= STARVING and self._may_bring():
            return True
        return (self._look or self._delivery.look_again) and self._may_bring()

    def _should_warm(self, batch: Sequence[Coming] = ()) -> bool:
        room = self._delivery.has_room(batch) and not self._fetcher.readers.waiting  # queries would come behind them
        return self._warming.wanted and not self._pending.cold and room

    def _may_bring(self) -> bool:
        return self._prefetch or not (self._pending.ready or self._delivery.coming or self._busy())

    def _patience(self) -> float | None:
        """Seconds until there is work without a wake-up: a query is late or starves, or the device is idle."""
        deadline = self._pending.earliest_deadline()
        late = None if deadline is None else min(LONGEST_WAIT, max(0.0, deadline - time.monotonic()))
        if not self._pending.cold:
            return late
        if not self._prefetch:
            return POLL
        return min([LONGEST_WAIT, *([STARVING] if self._starved else []), *([] if late is None else [late])])

    def _bring(self) -> None:
        """Stages the writes of the most urgent tasks that are not on their way, as far as slots are free."""
        self._looked = time.monotonic()
        delivery = self._delivery
        full, starving = set[ClassKey](), Counter[ClassKey]()
        batch: list[Coming] = []
        try:
            for entry, since in self._pending.absent(WINDOW).items():
                if delivery.arrived or self._fetcher.read or self._pending.closed or not delivery.has_room(batch):
                    break  # what arrived or was read is looked at again
                if (resident := self._tasks.hold(entry, 1)) is not None:  # it came after these queries were submitted
                    delivery.serve(entry, resident)
                    continue
                if not self._tasks.known(entry):
                    delivery.refuse(entry, _gone(entry))
                    continue
                if entry in delivery.coming or not self._fetcher.may_place(entry):
                    continue  # it is on its way, or the next one that has been read makes room
                if full.isdisjoint(entry.keys or ()) and not (full and entry.keys is None):
                    try:
                        placed = self._fetcher.place(entry)
                    except OutOfSpace as error:
                        keys = entry.keys or ()
                        if self._tasks.slots.hopeless(keys, entry.tenant):
                            delivery.refuse(entry, error)
                            continue
                        full.update(self._tasks.slots.lacking(keys, entry.tenant) or keys)
                    else:
                        batch += [placed] if placed else []
                        if len(batch) == TOGETHER:
                            delivery.stage(batch)
                            batch = []
                        continue
                if entry.keys and self._looked - since > STARVING:
                    starving.update(entry.keys)
                    self._tasks.slots.drain(entry.keys, entry.tenant, starving)
        finally:
            if batch:
                delivery.stage(batch)
        self._starved = bool(full)

    def _warm(self) -> None:
        """Stages the next of the tasks that no query has asked for yet."""
        delivery, warming = self._delivery, self._warming
        batch: list[Coming] = []
        try:
            while self._should_warm(batch) and len(batch) < TOGETHER and not delivery.arrived:
                entry, comes = warming.take(), False
                try:
                    if warming.may_come(entry, delivery.coming):
                        placed = self._fetcher.place(entry, evict=False)
                        batch += [placed] if placed else []
                        comes = placed is not None or entry in delivery.coming
                except OutOfSpace:
                    keys = entry.keys or ()
                    warming.found_full(self._tasks.slots.lacking(keys, entry.tenant, evict=False) or keys)
                finally:
                    if not comes:
                        warming.settled(entry)
        finally:
            if batch:
                delivery.stage(batch)


def _gone(entry: Entry) -> JpetsError:
    """For queries that waited for a task which is no longer there."""
    if entry.replaced:
        return Saturated(f"task {entry.task!r} was replaced while the query waited; ask again")
    return NotFound(f"unknown task {entry.task!r}")
