"""Threads that read tasks: quick readings one after another, slow ones side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support import wait_until

from jpets import readers as module
from jpets.readers import BACKLOG, READERS, Readers

HOUR = 3600.0


@pytest.fixture
def readers() -> Iterator[Readers]:
    made = Readers()
    made.start()
    yield made
    made.close()


class Blocked:
    """Readings that last until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.reading = self.most = self.done = 0

    def __call__(self) -> None:
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        self.go.wait(30)
        with self.lock:
            self.reading -= 1
            self.done += 1


def test_readings_begin_in_order(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", HOUR)
    order: list[int] = []
    for number in range(200):
        readers.submit(lambda number=number: order.append(number))  # type: ignore[misc]
    wait_until(lambda: len(order) == 200)
    assert order == list(range(200))


def test_quick_readings_do_not_run_side_by_side(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", HOUR)
    blocked = Blocked()
    for _ in range(5):
        readers.submit(blocked)
    wait_until(lambda: blocked.reading == 1)
    assert len(readers._wanted) == 4 and not readers.full
    blocked.go.set()
    wait_until(lambda: blocked.done == 5)
    assert blocked.most == 1


def test_slow_readings_run_side_by_side_up_to_a_limit(readers: Readers) -> None:
    blocked = Blocked()
    for _ in range(READERS + BACKLOG):
        readers.submit(blocked)
    wait_until(lambda: blocked.reading == READERS)
    assert readers.full and readers.busy
    blocked.go.set()
    wait_until(lambda: blocked.done == READERS + BACKLOG)
    assert blocked.most == READERS and not readers.busy


def test_closed_readers_begin_nothing_and_wait_for_nothing(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", HOUR)
    blocked, more = Blocked(), Blocked()
    readers.submit(blocked)
    wait_until(lambda: blocked.reading == 1)
    readers.submit(more)
    readers.close()
    blocked.go.set()
    for thread in readers._threads:
        thread.join(30)
    assert blocked.done == 1 and more.reading == more.done == 0


def test_quick_readings_are_not_held_up_by_a_slow_one(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has ended keeps nobody waiting, whatever still goes on beside it."""
    blocked, done = Blocked(), list[float]()
    readers.submit(blocked)
    readers.submit(lambda: done.append(0.0))
    wait_until(lambda: bool(done))
    monkeypatch.setattr(module, "QUICK", HOUR)
    for _ in range(50):
        readers.submit(lambda: done.append(0.0))
    wait_until(lambda: len(done) == 51)
    blocked.go.set()
