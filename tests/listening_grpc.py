"""A gRPC server in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from fastapi import FastAPI

from serving.grpc.server import GrpcServer
from serving.http.settings import ConnectionLimits

FEW = ConnectionLimits(most=64)


@contextlib.contextmanager
def listening(app: FastAPI, tls: tuple[bytes, bytes] | None = None, limits: ConnectionLimits = FEW) -> Iterator[str]:
    """The address of one beside ``app``."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> tuple[GrpcServer, int]:
        server = GrpcServer(app.state.context, limits, tls)
        return server, await server.start("127.0.0.1:0")

    server, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(1), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
