"""From the pooled vectors of a group's students to its answer, on the host."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from jpets.engine.results.results import failure, row_result
from jpets.errors import DeadlineExceeded, JpetsError, OutOfSpace, Saturated
from jpets.results import CombinedFuture
from jpets.types import Embedding, FloatArray, Result, Task, Timing

PASSING = (Saturated, OutOfSpace, DeadlineExceeded)
"""Errors of a student that the same query need not get again."""


def combined(id: str, task: Task | None, found: Sequence[Result], *, fixed: bool = False) -> Result:
    """The answer of a group by the vectors of its first students. Where one of these has none, those before it answer;
    an error where they are fewer than the group's ``least``. ``fixed``: where one has none for a reason that passes, as
    its programs are still prepared or its turn came too late, that is an error too: answers do not depend on the
    traffic. ``task`` has the group's head and multipliers; None where no student was ever read."""
    vectors: list[FloatArray] = []
    problem: JpetsError | None = None
    computed = [each.timing for each in found if each.timing is not None]
    for each in found:
        if not isinstance(each, Embedding):
            problem = each.error
            if fixed and isinstance(problem, PASSING):
                return failure(id, problem, each.tokens, _timing(computed[:1], computed))
            break
        vectors.append(each.embedding)
    timing = _timing([each.timing for each in found[: len(vectors)] if each.timing is not None], computed)
    least = task.students.least if task is not None and task.students is not None else 1
    if len(vectors) < least:
        # Where nobody knew of ``least`` before the file was read, too few were asked.
        problem = problem or Saturated(f"group {id!r} answers by {least} students or more; ask again")
        return failure(id, problem, found[0].tokens, timing)
    assert task is not None and task.students is not None
    multipliers = np.asarray(task.students.multipliers[: len(vectors)], np.float32)
    total: FloatArray = multipliers @ np.stack(vectors)
    logits = total @ task.head.tensors["kernel"] + task.head.tensors["bias"]
    answer = row_result(task, found[0].tokens, timing or NO_TIMING, True, total, logits.astype(np.float32))
    return dataclasses.replace(answer, students=len(vectors), version=found[0].version)


NO_TIMING = Timing(0.0, 0.0, "", "", False)


def _timing(read: Sequence[Timing], computed: Sequence[Timing]) -> Timing | None:
    """Of the students whose vectors were ``read``; without any, of all that were ``computed``. They run side by side:
    the answer is there with the last."""
    each = read or computed
    if not each:
        return None
    first = next((own for own in (*each, *computed) if not own.cached), each[0])
    return Timing(
        max(own.queued for own in each),
        max(own.computed for own in each),
        first.bucket,
        first.program,
        any(own.fallback for own in each),
        tokens=sum(own.tokens for own in computed if not own.cached),
    )


def when_all(parts: Sequence[Future[Result]], combine: Callable[[Sequence[Result]], Result]) -> Future[Result]:
    """A future with what ``combine`` makes of all results. Cancelled, it cancels the parts."""
    whole = CombinedFuture(parts)
    left, lock = len(parts), threading.Lock()

    def one_more(part: Future[Result]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if part.cancelled():
            whole.cancel()
        if last and whole.set_running_or_notify_cancel():
            try:
                whole.set_result(combine([own.result() for own in parts]))
            except BaseException as error:  # noqa: BLE001 (the error belongs to the query)
                whole.set_exception(error)

    def cancelled(own: Future[Result]) -> None:
        if own.cancelled():
            for part in parts:
                part.cancel()

    whole.add_done_callback(cancelled)
    for part in parts:
        part.add_done_callback(one_more)
    return whole
