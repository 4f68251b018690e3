"""Writes tasks to their slots, between batches, and gives them the queries that waited for them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.queue.answers import Answers
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.engine.residency.loading import LoadedTask
from jpets.engine.residency.writing import SlotWriter
from jpets.engine.results.results import as_refusal
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.table import TaskTable
from jpets.errors import EngineFailure, JpetsError, Saturated
from jpets.types import Query

log = logging.getLogger(__name__)

COMING = 32
"""Tasks that may be on their way to the device at once."""


@dataclass(frozen=True)
class Coming:
    """A task on its way to the device, as of that turn of its entry."""

    entry: Entry
    resident: Resident
    turn: int
    loaded: LoadedTask


Failures = Mapping[Entry, Exception]
"""Errors of tasks that could not be written."""


class Delivery:
    """``row`` makes a query's row for a task that came. At most ``most_bytes`` are on their way to the device, or a
    single task. ``used`` is told of the classes of tasks that came.

    One thread delivers, that of ``Residency``; the owner thread writes, and puts the written tasks into ``arrived``.
    """

    def __init__(
        self,
        tasks: TaskTable,
        pending: PendingQueue,
        answers: Answers,
        replica: Replica,
        writer: SlotWriter,
        row: Callable[[Query, Resident], Row],
        most_bytes: float,
        used: Callable[[Iterable[ClassKey]], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Tasks brought from ``host`` or by ``load``, that ``failed``, and the ``bytes`` that were written."""
        self.coming: dict[Entry, int] = {}
        """Tasks on their way to the device, those that are being read among them, and their bytes."""
        self.arrived: deque[tuple[Sequence[Coming], Failures]] = deque()
        self.look_again = False
        """Queries were taken out of the order in which tasks come; others may have stood behind them."""
        self._tasks = tasks
        self._pending = pending
        self._answers = answers
        self._replica = replica
        self._writer = writer
        self._row = row
        self._most_bytes = most_bytes
        self._used = used

    def has_room(self, batch: Sequence[Coming] = ()) -> bool:
        """Whether one more task may be on its way, besides those that are and ``batch``."""
        size = sum(self.coming.values()) + sum(coming.loaded.nbytes for coming in batch)
        return len(self.coming) + len(batch) < COMING and size <= self._most_bytes

    def begin(self, entry: Entry, size: int) -> None:
        """A task of so many bytes, about, is being read. However large it is, others have room beside it: its source
        may be slow, and its bytes are not here yet."""
        self.coming[entry] = int(min(size, max(1.0, self._most_bytes / COMING)))

    def stage(self, batch: Sequence[Coming]) -> None:
        """Makes the owner thread write these between two batches; then they are in ``arrived``."""
        failures: dict[Entry, Exception] = {}

        def write() -> None:
            for coming in batch:
                slots, contents = coming.resident.slots, coming.loaded.contents
                try:
                    self._writer.write({key: (slots[key], arrays) for key, arrays in contents.items()})
                except Exception as error:  # it must not affect the batch's other tasks
                    log.exception("a task could not be written", extra={"task": coming.entry.task})
                    failures[coming.entry] = error

        try:
            done = self._replica.staging.stage(write)
        except Saturated:  # the engine closes, and tells the waiting queries itself
            return
        self.counts["bytes"] += sum(coming.loaded.nbytes for coming in batch)
        self.coming.update((coming.entry, coming.loaded.nbytes) for coming in batch)

        def finished(done: Future[None]) -> None:
            with self._pending.changed:
                self.arrived.append((batch, failures))
                self._pending.changed.notify_all()

        done.add_done_callback(finished)

    def admit(self, came: Coming, failure: Exception | None) -> None:
        """Shows a task that was written to queries; if the write failed, its queries are told why."""
        entry, resident = came.entry, came.resident
        self.coming.pop(entry, None)
        if failure is not None:
            self._tasks.slots.release(resident.slots)
            self.refuse(entry, failure, came.turn)
        elif self._tasks.bring(resident, came.turn):
            self._used(resident.slots)
            if (held := self._tasks.hold(entry, 1)) is not None:
                self.serve(entry, held)

    def serve(self, entry: Entry, resident: Resident) -> None:
        """The cold queries of a task on the device become ready. ``resident`` is held for one query meanwhile."""
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
            self.look_again = True
            self._tasks.done(resident)

    def refuse(self, entry: Entry, error: BaseException, turn: int | None = None) -> None:
        """Tells a task's queries why it does not come, except those of a version that came after ``turn``."""
        self.look_again = True
        if turn is not None and entry.turn != turn:
            return
        told = error if isinstance(error, JpetsError) else EngineFailure(f"task {entry.task!r} could not be loaded")
        self.counts["failed"] += 1
        self._answers.fail(self._pending.remove(self._pending.waiting_for(entry)), told)
