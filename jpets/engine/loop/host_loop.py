"""The host loop: one thread that owns a device, and one that fetches its outputs.

Every batch is dispatched and every bank written by the owner thread, so banks can be donated. While the
device computes, the owner plans and assembles the next batch; ``in_flight`` bounds how far it runs ahead.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jpets.config import EngineSettings
from jpets.engine.device.memory import is_out_of_memory
from jpets.engine.device.replica import Replica
from jpets.engine.loop.completion import Completion, InFlight
from jpets.engine.loop.flight import FlightRoom
from jpets.engine.loop.trigger import Trigger
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.planner import Planner
from jpets.engine.programs.program import ProgramKey
from jpets.engine.queue.answers import LATE, Answers
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import WINDOW, PendingQueue
from jpets.engine.results.stats import Stats
from jpets.engine.workloads.workload import RowFailures, Workload
from jpets.errors import SHUTTING_DOWN, EngineFailure, JpetsError, Saturated

log = logging.getLogger(__name__)

LOST = 8
"""Batches in a row that a device fails before it is taken for lost: what one left there may fail all others."""
PrefetchHook = Callable[[Sequence[Pending]], None]


def _as_failure(error: Exception) -> JpetsError:
    """The error that the queries of a batch that could not run get."""
    if isinstance(error, JpetsError):
        return error
    return EngineFailure(f"the batch could not be run: {type(error).__name__}")


class HostLoop:
    """Runs one replica. ``want`` is told of programs that batches miss, and of the seconds lost.

    It has more than 20 methods, as each step of its two threads is one.
    """

    def __init__(
        self,
        replica: Replica,
        workload: Workload,
        planner: Planner,
        pending: PendingQueue,
        answers: Answers,
        stats: Stats,
        settings: EngineSettings,
        want: Callable[[ProgramKey, float], None],
    ) -> None:
        self.hooks: list[PrefetchHook] = []
        """Called on the owner thread with every batch's queries before it is assembled."""
        self._replica = replica
        self._workload = workload
        self._planner = planner
        self._pending = pending
        self._answers = answers
        self._stats = stats
        self._settings = settings
        self._want = want
        self._fetch: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._room = FlightRoom(settings.in_flight)
        self._dispatched = self._completed = 0
        """Batches; each is counted by one thread alone."""
        self._again: deque[Sequence[Pending]] = deque()
        """Parts of batches that failed as a whole."""
        self._ended = False
        self._progress = time.monotonic()
        self._applied_since = 0.0
        """Since when staged work is done that has not ended yet; 0 while none is."""
        self._lost = 0
        """Batches in a row that the device failed."""
        self._trigger = Trigger(planner, pending, replica.staging, settings)
        self._completion = Completion(workload, planner, pending, answers, stats)
        self._owner = threading.Thread(target=self._own, name="jpets-device", daemon=True)
        self._completer = threading.Thread(target=self._complete, name="jpets-complete", daemon=True)
        replica.staging.wake = self._wake

    def start(self) -> None:
        self._completer.start()
        try:
            self._owner.start()
        except BaseException:
            self._fetch.put(None)
            raise

    def join(self) -> None:
        """Waits until both threads have ended; the pending queue must have been closed."""
        for thread in (self._owner, self._completer):
            if thread.is_alive():
                thread.join(timeout=30)

    def idents(self) -> set[int]:
        return {thread.ident for thread in (self._owner, self._completer) if thread.ident is not None}

    @property
    def runs(self) -> bool:
        """Both threads are there, and the device was not lost."""
        return self._owner.is_alive() and self._completer.is_alive() and self._lost < LOST

    @property
    def live(self) -> bool:
        """Both threads run, and if there is work, some of it was done within ``stall_seconds``; the device did not fail
        ``LOST`` batches in a row."""
        if not self.runs:
            return False
        if self.busy or self._pending.ready:
            # There is no progress while there is nothing to do, nor while a batch waits for more queries.
            since = max(self._progress, self._pending.ready_since, self._trigger.until)
        elif (since := self._applied_since) == 0.0:
            return True
        return time.monotonic() - since < self._settings.stall_seconds

    @property
    def busy(self) -> bool:
        """Whether a batch is in flight."""
        return self._dispatched > self._completed

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last work; 0 while some runs or waits."""
        return 0.0 if self.busy or self._pending.ready else time.monotonic() - self._progress

    def _wake(self) -> None:
        with self._pending.changed:
            self._pending.changed.notify_all()

    def _own(self) -> None:
        while True:
            with self._pending.changed:
                while not (self._pending.ready or self._replica.staging.waiting or self._again or self._pending.closed):
                    self._pending.changed.wait()
                    self._progress = time.monotonic()
            self._apply()
            while self._again:
                self._run_again(self._again.popleft())
            if self._pending.closed:
                self._replica.staging.stop()
                self._end()
                self._fetch.put(None)
                return
            if self._pending.ready:
                self._step()

    def _apply(self) -> None:
        """Does the staged work."""
        self._applied_since = time.monotonic()
        try:
            self._replica.staging.apply()
        finally:
            self._applied_since = 0.0

    def _end(self) -> None:
        """From now on nothing runs again; work that was staged since the last batch is told so."""
        with self._pending.changed:
            self._ended = True
        for part in self._again:
            self._answers.fail(part, Saturated(SHUTTING_DOWN))

    def _step(self) -> None:
        """Schedule -> prefetch -> assemble -> dispatch, for one batch."""
        self._room.take()  # before planning: queries that arrive meanwhile can still join the batch
        try:
            # A batch that waits behind another could not be short anyway.
            plan = None
            if self._planner.contended():
                plan = self._room.drain_planning(self._plan_ahead, lambda: self._pending.arrivals)
            dispatched = self._dispatch_next(plan)
        except BaseException:
            self._room.free()
            raise
        if dispatched is None:
            self._room.free()
        else:
            self._dispatched += 1
            self._fetch.put(dispatched)

    def _plan_ahead(self) -> Plan | None:
        waiting = self._pending.most_urgent(WINDOW)
        if not waiting or not self._trigger.hungry:
            return None
        with contextlib.suppress(Exception):  # an error comes up again when the plan is needed
            return self._planner.next_batch(waiting)
        return None

    def _dispatch_next(self, plan: Plan | None) -> InFlight | None:
        """Dispatches one batch, by ``plan`` if there is one already; None if nothing was left to run.

        A query with a passed deadline is answered with that, wherever in the queue it stands, and is never computed.
        """
        self._answers.fail(self._pending.expire(time.monotonic()), LATE)
        arrivals = self._pending.arrivals
        waiting = plan.pendings if plan is not None else self._pending.most_urgent(WINDOW)
        if not waiting:
            return None
        if plan is None:
            if self._trigger.wait(waiting, arrivals):
                return None
            plan = self._plan(waiting)
        taken = self._pending.serve(plan.pendings, self._planner.keeping) if plan is not None else []
        if plan is None or not taken:
            return None
        try:
            if len(taken) < len(plan.pendings):  # some clients left while it was planned
                plan = self._planner.narrowed(plan, taken)
            self._planner.serving(plan)
            for hook in list(self.hooks):
                hook(taken)
            self._apply()
            started = self._start(plan)
        except Exception as error:  # one bad batch must not take the server down
            log.exception("a batch did not start")
            self._failed(taken, error)
            return None
        if started is not None and plan.wanted is not None:
            self._want(plan.wanted, plan.missed)
        return started

    def _plan(self, waiting: Sequence[Pending]) -> Plan | None:
        """The next batch of these; if they cannot be planned together, that of their more urgent half, and so on.

        None if even the most urgent one alone cannot be planned: it is told why, and the others are not affected.
        """
        while True:
            try:
                return self._planner.next_batch(waiting, busy=self.busy)
            except Exception as error:
                if len(waiting) == 1:
                    log.exception("a query could not be planned")
                    self._answers.fail(self._pending.remove(waiting), _as_failure(error))
                    return None
                waiting = waiting[: len(waiting) // 2]

    def _start(self, plan: Plan, *, alone: bool = False) -> InFlight | None:
        """Queries whose rows cannot be made are told why, the others run; None where none is left."""
        while True:
            try:
                gathered = self._workload.gathered(plan.rows)
                break
            except RowFailures as failures:
                left = self._answers.fail_some(plan.pendings, failures.errors)
            if not left:
                return None
            plan = self._planner.narrowed(plan, left)
        assembled = self._replica.fill(plan.layout, gathered, plan.program, plan.below)
        now = time.monotonic()
        outputs = self._replica.dispatch(plan.program, assembled, plan.copy)
        return InFlight(plan, assembled, outputs, now, alone)

    def _failed(self, pendings: Sequence[Pending], error: Exception, *, alone: bool = False) -> None:
        """A batch that did not run is split: its halves run, and in the end each query with the device to itself
        (``alone``), so that only the query that causes the error is told why. Where the device failed, all are told,
        unless it only had no room."""
        full = is_out_of_memory(error)
        if full:
            self._stats.had_no_memory()
            self._planner.drop_copies()
        device_failed = isinstance(error, jax.errors.JaxRuntimeError) and not full
        self._lost += device_failed
        if (device_failed or full) and self._workload.row_cache is not None:
            self._workload.row_cache.forget()
        if not device_failed and (len(pendings) > 1 or not alone):
            middle = len(pendings) // 2
            self._split([part for part in (pendings[:middle], pendings[middle:]) if part])
            return
        if full:
            error = Saturated("the device has no memory for this query alone; try again, or send a shorter one")
        self._answers.fail(pendings, _as_failure(error))

    def _split(self, parts: Sequence[Sequence[Pending]]) -> None:
        """Makes these parts run before anything else, one after the other."""
        with self._pending.changed:
            if not self._ended:
                self._again += parts
                self._pending.changed.notify_all()
                return
        for part in parts:
            self._answers.fail(part, Saturated(SHUTTING_DOWN))

    def _run_again(self, pendings: Sequence[Pending]) -> None:
        """Runs a part of a batch that did not run, with the device to itself."""
        now = time.monotonic()
        self._answers.fail([p for p in pendings if p.deadline is not None and p.deadline <= now], LATE)
        pendings = [p for p in pendings if not p.ended]
        if not pendings:
            return
        self._room.take()
        self._room.drain()
        try:
            started = self._start(self._planner.place(pendings), alone=True)
        except Exception as error:
            log.exception("a part of a batch did not start")
            self._room.free()
            self._failed(pendings, error, alone=True)
            return
        if started is None:
            self._room.free()
            return
        self._dispatched += 1
        self._fetch.put(started)

    def _complete(self) -> None:
        while (batch := self._fetch.get()) is not None:
            pendings, alone, problem = batch.plan.pendings, batch.alone, None
            try:
                self._completion.complete(batch, jax.tree.map(np.asarray, batch.outputs))
                self._lost = 0
            except Exception as error:  # the device failed; the queries are answered, the loop goes on
                log.exception("a batch failed on the device")
                problem = error.with_traceback(None)
            del batch  # its arrays leave the device before anything runs again
            if problem is not None:
                self._failed(pendings, problem, alone=alone)
            del pendings  # and with them the tables that their texts were looked up in
            self._room.free()
            self._completed += 1
            self._progress = time.monotonic()
