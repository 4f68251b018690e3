"""What several threads ask for at a time is done together: a disk makes sure of much in the time of little."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


class Grouped(Generic[Given, Found]):
    """A function of one argument whose calls wait for each other: those that come while ``work`` runs are its next
    group.

    ``work`` gets the arguments of a group, in the order in which they came, and returns what each call returns. What it
    raises every call of the group raises. It runs in the thread of one of them, never twice at a time.
    """

    def __init__(self, work: Callable[[Sequence[Given]], Sequence[Found]]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._waiting: list[tuple[Given, Future[Found]]] = []
        self._turn = threading.Lock()

    def __call__(self, given: Given) -> Found:
        done = Future[Found]()
        with self._lock:
            self._waiting.append((given, done))
        with self._turn:
            if not done.done():  # else the group of the call before had it too
                self._run()
        return done.result()

    def _run(self) -> None:
        with self._lock:
            group, self._waiting = self._waiting, []
        try:
            found = self._work([given for given, _ in group])
        except BaseException as error:  # noqa: BLE001 (it is for those who wait)
            for _, done in group:
                done.set_exception(error)
        else:
            for (_, done), own in zip(group, found, strict=True):
                done.set_result(own)
