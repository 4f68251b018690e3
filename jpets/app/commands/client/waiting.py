"""Waiting for what a server does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from jpets.app.commands.client.client import NoAnswer
from jpets.errors import DeadlineExceeded, OverQuota, Saturated

SOON, LATER = 0.2, 3.0
"""Seconds between two looks, at first and in the end: looks count as requests of their tenant."""
SLOWER = 1.2
"""How many times as long each wait is as the one before."""
PATIENCE = 300.0
"""Seconds without an answer after which nothing is waited for any more: a server may start again meanwhile."""
Seen = TypeVar("Seen")


def looks(look: Callable[[], Seen]) -> Iterator[Seen]:
    """What ``look`` finds, again and again. What is waited for goes on while no server answers or one has no room, so
    such errors are raised after ``PATIENCE`` alone."""
    wait, answered = SOON, time.monotonic()
    while True:
        time.sleep(wait)
        wait = min(LATER, SLOWER * wait)
        try:
            seen = look()
        except (NoAnswer, Saturated, OverQuota, DeadlineExceeded):
            if time.monotonic() > answered + PATIENCE:
                raise
        else:
            answered = time.monotonic()
            yield seen
