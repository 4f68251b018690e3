"""Calls that come while one runs are done together."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support import wait_until

from checkpoints.grouped import Grouped, Outcome


class Doubling:
    """Work that runs only while it ``may``; negative numbers it refuses, and with them their group."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.may = threading.Event()

    def __call__(self, given: Sequence[int]) -> Sequence[int]:
        self.groups.append(list(given))
        assert self.may.wait(30)
        if min(given) < 0:
            raise ValueError("a negative number")
        return [2 * number for number in given]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(10) as made:
        yield made


def start(pool: ThreadPoolExecutor, work: Doubling, waiting: Sequence[int]) -> Sequence[Future[int]]:
    """The calls for 0, which runs until ``work`` may go on, and for those that wait meanwhile."""
    double = Grouped(work)
    first = pool.submit(double, 0)
    wait_until(lambda: bool(work.groups))
    others = [pool.submit(double, number) for number in waiting]
    wait_until(lambda: len(double._waiting) == len(waiting))
    return [first, *others]


def test_calls_that_come_while_one_runs_are_its_next_group(pool: ThreadPoolExecutor) -> None:
    work = Doubling()
    calls = start(pool, work, range(1, 9))
    work.may.set()
    assert [call.result(30) for call in calls] == [2 * number for number in range(9)]
    assert work.groups[0] == [0] and sorted(work.groups[1]) == list(range(1, 9)) and len(work.groups) == 2


def test_an_error_is_that_of_its_whole_group(pool: ThreadPoolExecutor) -> None:
    work = Doubling()
    first, *others = start(pool, work, [1, -1, 2])
    work.may.set()
    assert first.result(30) == 0
    for call in others:
        with pytest.raises(ValueError, match="a negative number"):
            call.result(30)


def test_calls_one_after_the_other_are_groups_of_their_own() -> None:
    work = Doubling()
    work.may.set()
    double = Grouped(work)
    assert [double(number) for number in (1, 2)] == [2, 4]
    with pytest.raises(ValueError, match="a negative number"):
        double(-1)
    assert double(3) == 6 and work.groups == [[1], [2], [-1], [3]]


def test_work_that_answers_too_few_leaves_nobody_waiting(pool: ThreadPoolExecutor) -> None:
    short = Grouped[int, int](lambda given: [])
    for call in [pool.submit(short, number) for number in range(8)]:
        with pytest.raises(ValueError, match="shorter"):
            call.result(30)


class Content:
    """What can be watched."""


@pytest.mark.parametrize("refused", [True, False], ids=["alone", "its group"])
def test_what_an_error_was_about_is_free_once_it_is_told(refused: bool) -> None:
    """Without a search for cycles: files are large."""

    def work(given: Sequence[Content]) -> Sequence[Outcome[int]]:
        if not refused:
            raise ValueError("no")
        outcome = Outcome[int]()
        try:
            raise ValueError(f"no {given[0]}")
        except ValueError as error:
            outcome.fail(error)
        return [outcome]

    def ask() -> weakref.ref[Content]:
        content = Content()
        with contextlib.suppress(ValueError):
            Grouped(work)(content).take()
        return weakref.ref(content)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()
