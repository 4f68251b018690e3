"""Bounds of what may stay open without sending anything: a call takes its place from its headers on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

ARRIVAL_SECONDS = 60.0
"""Seconds that the one message of a call may take to come."""
SILENT_SECONDS = 60.0
"""Seconds without a question after which a stream of reflection ends."""
ARRIVED: ContextVar[float] = ContextVar("arrived")
"""When the headers of a call of one message came (``time.monotonic``)."""
Messages = AsyncIterator[Any]
Handler = Any
"""``grpc.RpcMethodHandler``: the package has no types."""


class _Waiting:
    """A call whose message has not come."""

    def __init__(self) -> None:
        self.until: asyncio.Timeout = asyncio.timeout(ARRIVAL_SECONDS)
        self.evicted = False

    def evict(self) -> None:
        """Ends it for another one, unless its time is just over."""
        if not self.until.expired():
            self.evicted = True
            self.until.reschedule(0.0)


class Arrivals(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the package has no types
    """Ends calls of one message that does not come; at most ``most`` wait for theirs at a time, and the one that has
    waited for longest makes room: what sends nothing must not keep others out."""

    def __init__(self, most: int) -> None:
        self._waiting: dict[_Waiting, None] = {}
        self._most = most

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        own = await continuation(details)
        if own is None or own.request_streaming:
            return own

        async def one(messages: Messages, call: Any) -> Any:
            ARRIVED.set(time.monotonic())
            return await own.unary_unary(await self._only(messages, call), call)

        async def several(messages: Messages, call: Any) -> AsyncIterator[Any]:
            async for each in own.unary_stream(await self._only(messages, call), call):
                yield each

        if own.response_streaming:
            return grpc.stream_stream_rpc_method_handler(several, own.request_deserializer, own.response_serializer)
        return grpc.stream_unary_rpc_method_handler(one, own.request_deserializer, own.response_serializer)

    async def _only(self, messages: Messages, call: Any) -> Any:
        """The call's message; aborts it where there is none."""
        if len(self._waiting) >= self._most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.evict()
        own = _Waiting()
        try:
            async with own.until:
                self._waiting[own] = None
                try:
                    return await anext(aiter(messages))
                finally:
                    self._waiting.pop(own, None)
        except TimeoutError:
            if own.evicted:
                full = "too many calls wait for their message; try again, and send it with the call"
                await call.abort(grpc.StatusCode.UNAVAILABLE, full)
            late = f"expected the message within {ARRIVAL_SECONDS:g} seconds; send it with the call"
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, late)
        except StopAsyncIteration:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected one message, found none")


class BoundedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """Descriptions of ``services``, on at most ``most`` streams at a time, each until it is silent."""

    def __init__(self, services: tuple[str, ...], pool: Any, most: int) -> None:
        super().__init__(services, pool)
        self._open, self._most = 0, most

    async def ServerReflectionInfo(self, request_iterator: Messages, context: Any) -> Messages:
        if self._open >= self._most:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most} streams read descriptions already; try again"
            )
        self._open += 1
        try:
            async for answer in super().ServerReflectionInfo(_until_silent(request_iterator), context):
                yield answer
        finally:
            self._open -= 1


async def _until_silent(messages: Messages) -> Messages:
    each = aiter(messages)
    while True:
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                message = await anext(each)
        except (TimeoutError, StopAsyncIteration):
            return
        yield message
