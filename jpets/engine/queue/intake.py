"""From a query to an item that waits for a batch: its row, and a hold on its task."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

from jpets.engine.queue.answers import LATE
from jpets.engine.queue.pending import Pending
from jpets.engine.results.results import as_refusal, failure
from jpets.engine.results.stats import Stats
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.table import TaskTable
from jpets.engine.workloads.workload import Workload
from jpets.errors import DeadlineExceeded, NotFound
from jpets.types import Query, Result

Acquired = Mapping[tuple[str | None, str | None], Resident | Entry]
"""(owner, task) of a query -> what is known of the task; held if it is on the device."""
NOTHING: Acquired = MappingProxyType({})


class Intake:
    """Prepares the queries of one engine, in the thread that submits them."""

    def __init__(self, workload: Workload, tasks: TaskTable, stats: Stats) -> None:
        self._workload = workload
        self._tasks = tasks
        self._stats = stats

    def acquire(self, queries: Sequence[Query], tenant: str) -> Acquired:
        """The tasks of a submission, each looked up once and held for all of its queries; unknown tasks are left
        out."""
        found: dict[tuple[str | None, str | None], Resident | Entry] = {}
        counts = Counter((query.owner, query.task) for query in queries if isinstance(query.task, str))
        for (owner, task), count in counts.items():
            with contextlib.suppress(NotFound):
                found[owner, task] = self._tasks.acquire(owner or tenant, task, count)
        return found

    def prepare(
        self,
        query: Query,
        deadline: float | None,
        priority: int,
        tenant: str,
        acquired: Acquired = NOTHING,
    ) -> Pending | Future[Result]:
        """The item that waits, or the answer if something is wrong with the query. Its task is looked up if it is not
        in ``acquired``."""
        found: Resident | Entry | None = None
        try:
            if query.task is not None:
                found = acquired.get((query.owner, query.task))
                found = found or self._tasks.acquire(query.owner or tenant, query.task)
            if deadline is not None and time.monotonic() > deadline:  # a submission may take long to tokenise
                raise DeadlineExceeded(LATE.message)
            if isinstance(found, Entry):
                row = self._workload.stand_in(query)
                return Pending(query.task, None, row, deadline, priority, tenant, absent=found, query=query)
            return Pending(query.task, found, self._workload.row(query, found), deadline, priority, tenant)
        except Exception as error:  # noqa: BLE001 (an error of one query must not stop the others)
            if isinstance(found, Resident):
                self._tasks.done(found)
            told = as_refusal(error)
            future: Future[Result] = Future()
            future.set_result(failure(query.task, told))
            self._stats.answered(told.code)
            return future

    def give_back(self, prepared: Iterable[Pending | Future[Result]]) -> None:
        """Releases the tasks of queries that will not run."""
        for item in prepared:
            if isinstance(item, Pending) and item.resident is not None:
                self._tasks.done(item.resident)

    def release(self, queries: Sequence[Query], acquired: Acquired) -> None:
        """Releases the tasks of queries that were not prepared."""
        for query in queries:
            if isinstance(query.task, str) and isinstance(held := acquired.get((query.owner, query.task)), Resident):
                self._tasks.done(held)
