"""The end of a query: its future gets a result, its task is released, and it is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jpets.engine.queue.pending import Pending
from jpets.engine.results.results import failure
from jpets.engine.results.stats import Stats
from jpets.engine.tasks.table import TaskTable
from jpets.errors import DeadlineExceeded, JpetsError
from jpets.types import Result

LATE = DeadlineExceeded("the deadline passed before the query was computed; allow more time or send fewer")


class Answers:
    """Answers queries that have left the queue, each only once, however often it is tried.

    A query has one owner at a time (``PendingQueue.remove``), so different ones may be answered on different threads.
    """

    def __init__(self, tasks: TaskTable, stats: Stats) -> None:
        self._tasks = tasks
        self._stats = stats

    def give(self, pending: Pending, result: Result) -> None:
        """Gives a result. A query of a client that has left is counted as cancelled."""
        if self._ends(pending):
            pending.future.set_result(result)
            self._stats.answered(result.error.code if result.error else "ok")

    def left(self, pending: Pending) -> None:
        """The client of a query has left: its future is cancelled."""
        self._ends(pending)

    def fail(self, pendings: Iterable[Pending], error: JpetsError) -> None:
        """Answers with an error; queries of a half-failed batch that have their answer keep it."""
        for pending in pendings:
            self.give(pending, failure(pending.task, error, pending.row.text_tokens))

    def fail_some(self, pendings: Sequence[Pending], errors: Mapping[int, JpetsError]) -> list[Pending]:
        """Answers the queries of these numbers with errors of their own; returns the others."""
        for number, error in errors.items():
            self.fail([pendings[number]], error)
        return [pending for number, pending in enumerate(pendings) if number not in errors]

    def _ends(self, pending: Pending) -> bool:
        """Releases the task; returns whether a client still waits for the answer."""
        if pending.ended:
            return False
        pending.ended = True
        if pending.resident is not None:
            self._tasks.done(pending.resident)
        waits = pending.future.set_running_or_notify_cancel()
        if not waits:
            self._stats.answered("cancelled")
        return waits
