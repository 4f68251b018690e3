"""The bound of all bodies in memory: the bytes that are counted, the bodies that give way, and that everything is given
back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message

from serving.http.body_budget import FREE, BodyBudget, NoRoom

LIMIT = 10 * FREE


class Sender:
    """A client that sends pieces of this many bytes when it is told to."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, size: int, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": bytes(size), "more_body": more})

    async def receive(self) -> Message:
        return await self._pieces.get()


class Request:
    """Reads a body within a budget, and then waits for its end."""

    def __init__(self, budget: BodyBudget) -> None:
        self.sender = Sender()
        self.may_end = asyncio.Event()
        self.read = 0
        self.task = asyncio.create_task(self._run(budget))

    async def _run(self, budget: BodyBudget) -> None:
        with budget.body(self.sender.receive) as body:
            more = True
            while more:
                message = await body.receive()
                self.read += len(message["body"])
                more = message["more_body"]
            await self.may_end.wait()

    async def gets(self, size: int, more: bool = True) -> None:
        wanted = self.read + size
        self.sender.send(size, more)
        while self.read < wanted and not self.task.done():
            await asyncio.sleep(0)
        if self.task.done():
            await self.task


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


@pytest.fixture
def budget() -> BodyBudget:
    return BodyBudget(LIMIT)


@pytest.mark.parametrize("ends", ["answered", "cancelled", "refused"])
def test_what_was_taken_is_given_back(budget: BodyBudget, ends: str) -> None:
    async def main() -> None:
        first, second = Request(budget), Request(budget)
        await first.gets(3 * FREE)
        await first.gets(3 * FREE, more=False)
        await second.gets(FREE + 5)
        assert budget.held == 5 * FREE + 5
        if ends == "refused":
            with pytest.raises(NoRoom):
                await second.gets(6 * FREE)
        else:
            second.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await second.task
        assert budget.held == 5 * FREE
        first.may_end.set()
        await first.task
        assert budget.held == 0

    run(main())


def test_small_bodies_are_read_where_there_is_no_room(budget: BodyBudget) -> None:
    async def main() -> None:
        large, small, other = Request(budget), Request(budget), Request(budget)
        await large.gets(LIMIT + FREE, more=False)
        await small.gets(FREE // 2)
        await small.gets(FREE // 2, more=False)
        with pytest.raises(NoRoom) as refused:
            await other.gets(FREE + 1, more=False)
        assert refused.value.status_code == 503 and refused.value.headers == {"Retry-After": "1"}
        for each in (large, small):
            each.may_end.set()
            await each.task

    run(main())


def test_one_alone_may_be_larger(budget: BodyBudget) -> None:
    async def main() -> None:
        large = Request(budget)
        for _ in range(5):
            await large.gets(LIMIT)
        large.may_end.set()
        await large.gets(LIMIT, more=False)
        await large.task
        assert budget.held == 0

    run(main())


def test_bodies_that_have_come_for_long_give_way(budget: BodyBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more bodies than necessary; those that have come whole are kept."""
    monkeypatch.setattr("serving.http.body_budget.PATIENCE", -1.0)

    async def main() -> None:
        whole, oldest, slow, newcomer = (Request(budget) for _ in range(4))
        await whole.gets(4 * FREE, more=False)
        await oldest.gets(4 * FREE)
        await slow.gets(4 * FREE)
        await newcomer.gets(3 * FREE)
        with pytest.raises(NoRoom):
            await oldest.task
        assert not slow.task.done() and not whole.task.done()
        for each in (whole, slow, newcomer):
            each.may_end.set()
        await slow.gets(1, more=False)
        await newcomer.gets(1, more=False)
        await asyncio.gather(whole.task, slow.task, newcomer.task)
        assert budget.held == 0

    run(main())
