"""Large work of requests, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SHORT = 1000
"""Characters or token ids that are worked on in the event loop: a hop to another thread takes longer."""
THREADS = 2


class Aside:
    """Few threads for the large work of all requests, in the order in which it came.

    More threads would not be faster, as most of this work holds the interpreter's lock. They would compete for it with
    the event loop, which would wait for many turns. With a single thread, one text that takes seconds would hold up all
    other work.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="jpets-large")

    async def do(self, effort: int, work: Callable[[], T]) -> T:
        """``work()``, in one of the threads where ``effort`` (characters) is more than ``SHORT``. Where this is
        cancelled before a thread is free, nothing keeps what ``work`` holds, such as a body."""
        if effort <= SHORT:
            return work()
        waiting = [work]
        del work  # frames of errors outlive a call
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: waiting.pop()())
        finally:
            waiting.clear()
