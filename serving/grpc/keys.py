"""The key of a call over gRPC: looked at before any message is read, and as long as a stream is open."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from jpets.errors import Unauthorized
from serving.grpc.messages import HEALTH, METHODS, SERVICE
from serving.grpc.peers import close_connection
from serving.requests.context import Context
from serving.tenants.asker import Asker
from serving.tenants.gate import key_of
from serving.tenants.keyring import REFUSAL

PROBES = ("ServerLive", "ServerReady")
"""Methods of the Open Inference Protocol that need no key, as over HTTP."""
OPEN = (f"/{HEALTH}/Check", *(f"/{SERVICE}/{name}" for name in PROBES))
"""What probes ask."""
UNMATCHED = "unmatched"
LOOK = 0.5
"""Seconds between looks whether the key of an open stream is accepted still."""
UNREAD = 10.0
"""Seconds for which the client of a stream may read nothing once its key has ended."""
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
Handler: TypeAlias = Any
"""``grpc.RpcMethodHandler``: the package has no types."""


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the package has no types
    """Refuses calls without a key where one is needed: also those that would stay open and send nothing. Streams end
    with their key, whatever their service. To be before ``Arrivals``, behind which every stream is one of messages
    too."""

    def __init__(self, here: Context) -> None:
        self._here = here
        self.port = 0
        """The server's, once it listens."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        method = details.method
        if method in OPEN:
            return await continuation(details)
        try:
            asker = self._here.keyring.asker(key_in(details.invocation_metadata))
        except Unauthorized as error:
            problem = error.message

            async def refuse(messages: Any, call: Any) -> None:
                del messages
                await self._refuse(call, method, problem)

            return grpc.stream_stream_rpc_method_handler(refuse)
        own = await continuation(details)
        if own is None or not own.response_streaming:
            return own

        async def stream(messages: Any, call: Any) -> None:
            await call.send_initial_metadata(())  # else no status could follow an answer that is just being written
            try:
                async with asyncio.timeout(None) as accepted:
                    look = asyncio.create_task(self._end(accepted, asker))
                    try:
                        await _handled(own.stream_stream, messages, call)
                    finally:
                        look.cancel()
            except TimeoutError:
                if not accepted.expired():
                    raise
                if not call.done():  # else it ended just then
                    await self._ended(call, method)

        return grpc.stream_stream_rpc_method_handler(stream, own.request_deserializer, own.response_serializer)

    async def _end(self, accepted: asyncio.Timeout, asker: Asker) -> None:
        """Has ``accepted`` expire once the key is not accepted any more."""
        with contextlib.suppress(Unauthorized):
            while True:
                self._here.keyring.check(asker)
                await asyncio.sleep(LOOK)
        accepted.reschedule(0.0)

    async def _ended(self, call: Any, method: str) -> None:
        """Tells a stream that its key has ended, behind what its client has not read yet; if that does not read on, its
        connection is closed."""
        closing = asyncio.get_running_loop().call_later(UNREAD, close_connection, call.peer(), self.port)
        try:
            with contextlib.suppress(grpc.aio.InternalError):  # closed, or left
                await self._refuse(call, method, REFUSAL)
        finally:
            closing.cancel()

    async def _refuse(self, call: Any, method: str, problem: str) -> None:
        code = grpc.StatusCode.UNAUTHENTICATED
        self._here.metrics.remote_call(_counted(method), code.name, 0.0)
        await call.abort(code, problem)


async def _handled(handler: Callable[..., Any], messages: Any, call: Any) -> None:
    """Runs a stream's handler of either kind: one that writes its answers, or one that yields them."""
    if not inspect.isasyncgenfunction(handler):
        await handler(messages, call)
        return
    async with contextlib.aclosing(handler(messages, call)) as answers:
        async for answer in answers:
            await call.write(answer)


def _counted(path: str) -> str:
    """The name under which a refused call is counted: anybody may ask for any path."""
    service, _, name = path.removeprefix("/").rpartition("/")
    return name if service == SERVICE and name in METHODS else UNMATCHED


def key_in(metadata: Metadata | None) -> str | None:
    """The key in a call's metadata, under the names that HTTP has."""
    return key_of({name.encode(): _bytes(value) for name, value in metadata or ()})


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
