"""A real HTTP server in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from serving.http.connections import Connections
from serving.http.settings import ConnectionLimits


@contextlib.contextmanager
def listening(app: ASGIApp, **config: Any) -> Iterator[str]:
    """The URL at which ``app`` answers, as the server's own process has it listen."""
    limits = ConnectionLimits()
    how = {"http": Connections(limits).protocol, "timeout_keep_alive": limits.keep_alive, **config}
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", **how))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()
