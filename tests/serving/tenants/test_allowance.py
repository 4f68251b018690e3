"""Token buckets: never more than the rate allows, and what was not used is given back."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.access import Limits
from jpets.engine.queue.response_cache import HIT
from jpets.engine.students.combining import when_all
from jpets.errors import OverQuota
from jpets.types import Query, Result, Timing
from serving.requests.ask import tokens_of
from serving.tenants.allowance import BURST, Allowance, Bucket, computed_tokens


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def computed(tokens: int) -> Result:
    return Result(task="a", tokens=tokens, timing=Timing(0.0, 0.0, "", "", fallback=False, tokens=tokens))


steps = st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 200)), min_size=1, max_size=40)


@given(st.floats(0.01, 100), steps)
def test_never_more_than_the_rate_allows(rate: float, asked: list[tuple[float, float]]) -> None:
    clock = Clock()
    bucket = Bucket(rate, clock)
    full, taken = max(1.0, rate * BURST), 0.0
    for pause, count in asked:
        clock.now += pause
        wait = bucket.take(count)
        if wait:
            clock.now += wait + 1e-6 * (1 + wait)
            assert bucket.take(count) == 0, "what it says is enough"
        taken += count
        assert taken <= full + rate * clock.now + max(0.0, count - full) + 1e-3 * (1 + taken)


def test_what_is_more_than_it_holds_makes_a_debt() -> None:
    clock = Clock()
    bucket = Bucket(1.0, clock)
    assert bucket.take(100) == 0, "from a full one"
    assert bucket.take(1) == pytest.approx(101 - BURST)
    bucket.give(99)
    assert bucket.take(1) == 0
    bucket.give(1000)
    assert bucket.take(BURST) == 0 and bucket.take(1) > 0, "no more than it holds"


def test_tokens_are_settled() -> None:
    clock = Clock()
    allowance = Allowance(Limits(tokens_per_minute=3000), clock)
    queries = [Query("a", "x" * 392), Query("a", None, input_ids=[1] * 20)]
    counted = allowance.queries(queries, 512)
    assert counted == [100, 20]
    with pytest.raises(OverQuota, match="3000 tokens a minute") as error:
        allowance.queries(queries, 512)
    assert error.value.retry_after == 3
    allowance.settle(counted, [30, 20])
    assert allowance.queries([Query("a", "x" * 190)], 512) == [49]
    with pytest.raises(OverQuota):
        allowance.queries([Query("a", "x" * 190)], 512)


def test_all_tokens_that_were_computed_count() -> None:
    """Not those of the text alone: virtual tokens, and each student's, too."""
    allowance = Allowance(Limits(tokens_per_minute=3000), Clock())
    counted = allowance.queries([Query("a", "x" * 92)], 512)
    allowance.settle(counted, [computed_tokens(dataclasses.replace(computed(30), tokens=10))])
    with pytest.raises(OverQuota):  # of the 100 that may be saved up 70 are left
        allowance.queries([Query("a", None, input_ids=[1] * 80)], 512)
    allowance.queries([Query("a", None, input_ids=[1] * 60)], 512)


def test_what_was_not_computed_does_not_count() -> None:
    assert computed_tokens(Result(task="a", tokens=900)) == 0, "an error"
    assert computed_tokens(Result(task="a", tokens=900, timing=HIT)) == 0, "an earlier answer"
    allowance = Allowance(Limits(tokens_per_minute=3000), Clock())
    counted = allowance.queries([Query("a", None, input_ids=[1] * 40) for _ in range(2)], 512)
    allowance.settle(counted, [None, 0])
    assert allowance.queries([Query("a", None, input_ids=[1] * 60)], 512) == [60], "one is being computed still"
    with pytest.raises(OverQuota):
        allowance.queries([Query("a", None, input_ids=[1])], 512)
    allowance.give_back([60])
    allowance.queries([Query("a", None, input_ids=[1] * 60)], 512)


def test_of_cancelled_queries_those_that_left_the_queue_computed_nothing() -> None:
    done, waiting, computing, broken = (Future[Result]() for _ in range(4))
    done.set_result(computed(30))
    broken.set_exception(RuntimeError())
    for future in (waiting, computing):
        assert future.cancel()
    assert not waiting.set_running_or_notify_cancel()  # as the queue does where it takes one out
    assert tokens_of([done, waiting, computing, broken]) == [30, 0, None, 0]
    queued: Future[Result] = Future()
    queued.add_done_callback(lambda own: own.set_running_or_notify_cancel() and None)
    for parts, expected in (([Future[Result](), queued], None), ([done, queued], 30)):
        whole = when_all(parts, lambda found: found[0])
        assert whole.cancel() and tokens_of([whole]) == [expected], "each student of a group computes its own"


def test_without_limits_nothing_is_counted() -> None:
    allowance = Allowance()
    for _ in range(1000):
        allowance.request()
    assert allowance.queries([Query("a", "x" * 10_000)], 512) == ()
    limited = Allowance(Limits(tokens_per_minute=3000), Clock())
    assert limited.queries([Query("a", "x" * 10_000)], 64) == [64], "no task computes more"


def test_a_look_takes_nothing_and_says_what_would_be_refused() -> None:
    """Before long texts are tokenised, whose windows are counted later."""
    clock = Clock()
    allowance = Allowance(Limits(tokens_per_minute=600), clock)
    long = [Query("a", "word " * 100_000)]
    for _ in range(3):
        allowance.check(long)
    assert allowance.queries(long, 20) == [20]
    with pytest.raises(OverQuota, match="600 tokens"):
        allowance.check(long)
    clock.now += 60
    allowance.check(long)
    Allowance().check(long)
