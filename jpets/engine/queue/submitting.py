"""Puts the queries of a submission into the queue, or answers them at once from the response cache."""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from jpets.engine.queue.answers import Answers
from jpets.engine.queue.intake import Intake
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.engine.queue.response_cache import ResponseCache, response_key
from jpets.engine.queue.sharing import share_texts
from jpets.engine.results.results import worded
from jpets.errors import InvalidInput, Saturated
from jpets.types import Fills, Query, Result


class Submissions:
    """Accepts submissions, in the caller's thread. ``cold_came`` is called when a task has to be brought for one.
    Queries of one text may share the lower of the backbone's ``layers``, 0 if none ever do."""

    def __init__(
        self,
        intake: Intake,
        pending: PendingQueue,
        answers: Answers,
        cold_came: Callable[[], None],
        layers: int,
    ) -> None:
        self._intake = intake
        self._pending = pending
        self._answers = answers
        self._cold_came = cold_came
        self._layers = layers

    def submit(
        self, queries: Sequence[Query], deadline: float | None, priority: int, tenant: str, responses: ResponseCache
    ) -> list[Future[Result]]:
        """One future a query, in order. ``deadline`` is seconds from now; answers that ``responses`` has are given at
        once. Raises ``Saturated``, and ``InvalidInput`` for a deadline or a priority that is no number."""
        if deadline is not None and math.isnan(deadline):
            raise InvalidInput("deadline: expected seconds from now, found NaN")
        if not isinstance(priority, numbers.Integral):
            raise InvalidInput(f"priority: expected a whole number, found {priority!r}")
        queries = list(queries)  # read twice: an iterator would lose its queries
        until = None if deadline is None else time.monotonic() + deadline
        prepared: list[Pending | Future[Result]] = []
        acquired = self._intake.acquire(queries, tenant)
        try:
            for query in queries:
                prepared.append(self._intake.prepare(query, until, priority, tenant, acquired))
            if responses.budget:
                for at, item in enumerate(prepared):
                    if isinstance(item, Pending) and not item.cold:
                        prepared[at] = self._look_up(item, responses)
            coming = [item for item in prepared if isinstance(item, Pending)]
            self.share(coming)
            pushed_out = self._pending.put(coming)
        except BaseException:
            waiting = [item for item in prepared if isinstance(item, Pending)]
            self._intake.give_back(item for item in waiting if not item.queued)
            for item in waiting:
                item.future.cancel()
            self._intake.release(queries[len(prepared) :], acquired)
            raise
        if any(isinstance(item, Pending) and item.cold for item in prepared):
            self._cold_came()
        full = Saturated("the queue is full and others have less waiting; send fewer at a time")
        self._answers.fail(pushed_out, full)
        return [item.future if isinstance(item, Pending) else item for item in prepared]

    def share(self, waiting: Sequence[Pending]) -> None:
        """Marks those that may share their text's lower layers."""
        if self._layers:
            share_texts(waiting, self._layers)

    def _look_up(self, item: Pending, responses: ResponseCache) -> Pending | Future[Result]:
        """The kept answer to a query, or the query, so that its answer will be kept."""
        key = response_key(item.tenant, item.resident.loading if item.resident else None, item.row)
        result = responses.get(key)
        if result is None:
            item.keep = partial(responses.keep, key)
            return item
        if isinstance(result, Fills) and item.resident is not None and item.row.masked is not None:
            result = dataclasses.replace(result, masked=item.row.masked, tensors=item.resident.task.head.tensors)
        self._answers.give(item, worded(result, item.row.passage, item.row.spelling))
        return item.future
