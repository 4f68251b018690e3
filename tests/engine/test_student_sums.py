"""The sum of a group's vectors, and the future of its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np
import pytest
from groups import group_task
from support import logits_of

from jpets.engine.queue.response_cache import HIT
from jpets.engine.students.combining import combined, when_all
from jpets.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidTask,
    JpetsError,
    NotFinite,
    OutOfSpace,
    Preparing,
    Saturated,
)
from jpets.types import Embedding, Failure, Result, Timing

COMPUTED = Timing(0.0, 0.0, "", "", False, tokens=3)


def failed(error: JpetsError) -> Result:
    return Failure(task="m", tokens=3, error=error)


def result(vector: Sequence[float] | None) -> Result:
    if vector is None:
        return failed(NotFinite("no number"))
    return Embedding(task="m", tokens=3, embedding=np.asarray(vector, np.float32))


def test_sums_stop_at_the_first_student_without_a_vector() -> None:
    task = group_task()
    outline = dataclasses.replace(task, deltas=())
    rng = np.random.default_rng(0)
    vectors = rng.normal(0, 1, (3, 64)).astype(np.float32)
    whole = combined("group", outline, [result(own) for own in vectors])
    part = combined("group", outline, [result(vectors[0]), result(None), result(vectors[2])])
    one = combined("group", outline, [result(vectors[0])])
    assert (whole.students, part.students, one.students) == (3, 1, 1)
    np.testing.assert_array_equal(logits_of(part), logits_of(one))
    assert isinstance(combined("group", None, [result(None), result(vectors[1])]).error, NotFinite)


@pytest.mark.parametrize("error", [Preparing, Saturated, DeadlineExceeded, OutOfSpace])
def test_a_fixed_number_answers_or_none_while_a_reason_passes(error: type[JpetsError]) -> None:
    task = group_task()
    outline = dataclasses.replace(task, deltas=())
    vectors = [result(own) for own in np.random.default_rng(0).normal(0, 1, (3, 64)).astype(np.float32)]
    found = [vectors[0], failed(error("later")), vectors[2]]
    whole = combined("group", outline, found, fixed=True)
    assert isinstance(whole, Failure) and isinstance(whole.error, error) and whole.task == "group"
    assert combined("group", outline, found).students == 1
    for lasting in (NotFinite("no number"), EngineFailure("a lost device"), InvalidTask("a damaged file")):
        assert combined("group", outline, [vectors[0], failed(lasting), vectors[2]], fixed=True).students == 1


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("error", [NotFinite, Saturated])
def test_every_student_that_was_computed_is_told_of(error: type[JpetsError], fixed: bool) -> None:
    """Also those behind one without a vector, and where there is no answer: their tokens count for a quota."""
    task = group_task()
    outline = dataclasses.replace(task, deltas=())
    one, cached = result([0.0] * 64), dataclasses.replace(result([0.0] * 64), timing=HIT)
    one, lost = (dataclasses.replace(own, timing=COMPUTED) for own in (one, failed(error("no"))))
    for found, tokens in (
        ([one, one, one], 9),
        ([one, lost, one], 9),
        ([lost, one, one], 9),
        ([cached, one, lost], 6),
        ([cached, lost], 3),
    ):
        timing = combined("group", outline, found, fixed=fixed).timing
        assert timing is not None and (timing.tokens, timing.cached) == (tokens, False)
    timing = combined("group", outline, [cached, cached]).timing
    assert timing is not None and timing.cached


def test_cancelling_a_query_cancels_its_students() -> None:
    parts: list[Future[Result]] = [Future(), Future()]
    whole = when_all(parts, lambda found: found[0])
    assert whole.cancel() and all(part.cancelled() for part in parts)
    assert wait([whole], timeout=0).done, "who waits for it is told"
    parts = [Future(), Future()]
    whole = when_all(parts, lambda found: found[-1])
    parts[1].set_result(result([1.0]))
    assert not whole.done()
    parts[0].set_result(result([2.0]))
    found = whole.result(1)
    assert isinstance(found, Embedding) and found.embedding == [1.0]
