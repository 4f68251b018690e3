"""What several threads ask for at a time is done together: a disk makes sure of much in the time of little."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


class Outcome(Generic[Found]):
    """What a call returned or raised, to be taken once.

    An error refers to the frames that it passed, and with them to all that these held, as the bytes of a file. What is
    taken is referred to no more, else all of it would stay until cycles are collected.
    """

    def __init__(self) -> None:
        self._found: list[Found] = []
        self._error: BaseException | None = None
        self.known = False

    def set(self, found: Found) -> None:
        self._found.append(found)
        self.known = True

    def fail(self, error: BaseException) -> None:
        self._error, self.known = error, True

    def take(self) -> Found:
        """Raises what the call did."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # this frame is one of those
        return self._found.pop()


class Grouped(Generic[Given, Found]):
    """A function of one argument whose calls wait for each other: those that come while ``work`` runs are its next
    group.

    ``work`` gets the arguments of a group, in the order in which they came, and returns what each call returns. What it
    raises every call of the group raises. It runs in the thread of one of them, never twice at a time.
    """

    def __init__(self, work: Callable[[Sequence[Given]], Sequence[Found]]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._waiting: list[tuple[Given, Outcome[Found]]] = []
        self._turn = threading.Lock()

    def __call__(self, given: Given) -> Found:
        own = Outcome[Found]()
        with self._lock:
            self._waiting.append((given, own))
        with self._turn:
            if not own.known:  # else the group of the call before had it too
                self._run()
        return own.take()

    def _run(self) -> None:
        group: list[tuple[Given, Outcome[Found]]] = []
        try:
            with self._lock:
                group, self._waiting = self._waiting, []
            for (_, own), found in zip(group, self._work([given for given, _ in group]), strict=True):
                own.set(found)
        except BaseException as error:  # noqa: BLE001 (it is for those who wait)
            for _, own in group:
                if not own.known:
                    own.fail(error)
