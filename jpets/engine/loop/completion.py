"""The way back from a device: a batch's outputs become results, and are counted."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass

from jpets.engine.batch.assembly import Assembled
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.planner import Planner
from jpets.engine.programs.network import Outputs
from jpets.engine.queue.answers import Answers
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.engine.results.results import failure, worded
from jpets.engine.results.stats import BatchRecord, Stats
from jpets.engine.workloads.workload import Again, Place, Workload
from jpets.errors import SHUTTING_DOWN, EngineFailure, Saturated
from jpets.types import Timing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A dispatched batch."""

    plan: Plan
    assembled: Assembled
    outputs: Outputs
    dispatched: float
    alone: bool = False
    """No other batch was on the device when it was dispatched."""


class Completion:
    """Answers the queries of batches that were fetched. One thread at a time."""

    def __init__(
        self, workload: Workload, planner: Planner, pending: PendingQueue, answers: Answers, stats: Stats
    ) -> None:
        self._workload = workload
        self._planner = planner
        self._pending = pending
        self._answers = answers
        self._stats = stats
        self._fetched = 0.0
        """When the last batch was fetched: the device then began the next one, if it was already there."""

    def complete(self, batch: InFlight, outputs: Outputs) -> None:
        """``outputs`` are the batch's, in host memory. An error of one query costs no other its answer."""
        done = time.monotonic()
        self._count(batch, done)
        program, fallback = batch.plan.program, batch.plan.wanted is not None
        bucket, seconds = str(program.key.bucket), done - batch.dispatched
        again = []
        for at, pending in enumerate(batch.plan.pendings):
            queued, shared = batch.dispatched - pending.arrived, batch.plan.shared_layers
            timing = Timing(queued, seconds, bucket, program.label, fallback, shared, pending.row.length)
            if self._needs_more(batch.assembled, outputs, at, pending, timing):
                again.append(pending)
        if again:
            self._answers.fail(self._pending.put_back(again), Saturated(SHUTTING_DOWN))
        self._planner.ran(batch.plan.layout.table, program, self._computing(batch, done))
        self._fetched = done

    def _computing(self, batch: InFlight, done: float) -> float:
        """The device's seconds for a batch that was fetched at ``done``."""
        return done - max(batch.dispatched, self._fetched)

    def _count(self, batch: InFlight, done: float) -> None:
        """Counts a batch before its queries are answered: a client that has its answer finds it counted."""
        pendings = batch.plan.pendings
        record = BatchRecord(
            rows=len(pendings),
            real_tokens=sum(p.row.length for p in pendings),
            computed_tokens=self._computed_tokens(batch.plan),
            seconds=done - batch.dispatched,
            queued=tuple(batch.dispatched - p.arrived for p in pendings),
            fallback=batch.plan.wanted is not None,
            computing=self._computing(batch, done),
            predicted=batch.plan.seconds,
            missed=batch.plan.missed,
        )
        self._stats.ran(record)

    def _computed_tokens(self, plan: Plan) -> int:
        """Tokens as if each went through all layers."""
        own, trunk = plan.program.key.bucket.tokens, plan.program.key.trunk
        if trunk is None:
            return own
        return round(trunk.mean(self._workload.network.config.layers, trunk.bucket.tokens, own))

    def _needs_more(self, assembled: Assembled, outputs: Outputs, at: int, pending: Pending, timing: Timing) -> bool:
        """Answers a query, unless it needs another step: then it gets the row for that."""
        task = pending.resident.task if pending.resident else None
        row = int(assembled.order[at])
        place = Place(row, int(assembled.batch.rows.first_token[row]), assembled.heads[at])
        try:
            result = self._workload.result(task, pending.row, outputs, place, timing)
            if isinstance(result, Again):
                pending.row = result.row
                return True
            if pending.resident is not None and pending.resident.version is not None:
                result = dataclasses.replace(result, version=pending.resident.version)
            if pending.keep is not None:
                pending.keep(result)
            result = worded(result, pending.row.passage, pending.row.spelling)
        except Exception as error:
            log.exception("a row could not be answered")
            problem = EngineFailure(f"the answer could not be made: {type(error).__name__}")
            result = failure(pending.task, problem, pending.row.text_tokens, timing)
        self._answers.give(pending, result)
        return False
