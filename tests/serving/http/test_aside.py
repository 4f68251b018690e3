"""Large work of requests, beside the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from serving.http.aside import SHORT, THREADS, Aside


class Held:
    """What a request's work holds."""


def test_work_that_is_given_up_before_its_turn_holds_nothing() -> None:
    asyncio.run(_give_up())


async def _give_up() -> None:
    aside, free = Aside(), threading.Event()
    running = [asyncio.ensure_future(aside.do(SHORT + 1, free.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)

    def waiting() -> tuple[asyncio.Future[Held], weakref.ref[Held]]:
        held = Held()
        return asyncio.ensure_future(aside.do(SHORT + 1, lambda: held)), weakref.ref(held)

    work, held = waiting()
    await asyncio.sleep(0)
    assert held() is not None
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    del work
    gc.collect()
    assert held() is None
    free.set()
    assert await asyncio.gather(*running) == [True] * THREADS
    assert await aside.do(SHORT + 1, lambda: 5) == 5
