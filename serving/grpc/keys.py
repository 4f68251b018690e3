"""The key of a call over gRPC, looked at before any message is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from jpets.errors import Unauthorized
from serving.grpc.messages import HEALTH, METHODS, SERVICE
from serving.requests.context import Context
from serving.tenants.gate import key_of

OPEN = f"/{HEALTH}/Check"
"""What probes ask."""
UNMATCHED = "unmatched"
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the package has no types
    """Refuses calls without a key where one is needed: also those that would stay open and send nothing."""

    def __init__(self, here: Context) -> None:
        self._here = here

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        try:
            if details.method != OPEN:
                self._here.keyring.asker(key_in(details.invocation_metadata))
        except Unauthorized as error:
            problem = error.message

            async def refuse(messages: Any, call: Any) -> None:
                del messages
                code = grpc.StatusCode.UNAUTHENTICATED
                self._here.metrics.remote_call(_counted(details.method), code.name, 0.0)
                await call.abort(code, problem)

            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(details)


def _counted(path: str) -> str:
    """The name under which a refused call is counted: anybody may ask for any path."""
    service, _, name = path.removeprefix("/").rpartition("/")
    return name if service == SERVICE and name in METHODS else UNMATCHED


def key_in(metadata: Metadata | None) -> str | None:
    """The key in a call's metadata, under the names that HTTP has."""
    return key_of({name.encode(): _bytes(value) for name, value in metadata or ()})


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
