"""A gRPC server in a thread, over the tests' service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest
from fastapi import FastAPI
from remote import Remote

from serving.app import create_app
from serving.grpc.server import GrpcServer
from serving.hosted.service import Service
from serving.http.settings import ConnectionLimits, ServingSettings


@pytest.fixture(scope="session")
def app(service: Service) -> FastAPI:
    return create_app(service, ServingSettings(max_body_bytes=1 << 20))


@pytest.fixture(scope="session")
def address(app: FastAPI) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> tuple[GrpcServer, int]:
        server = GrpcServer(app.state.context, ConnectionLimits(most=64))
        return server, await server.start("127.0.0.1:0")

    server, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(1), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="session")
def remote(address: str) -> Iterator[Remote]:
    with grpc.insecure_channel(address) as channel:
        yield Remote(channel)
