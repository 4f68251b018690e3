"""Connections that are kept for the next request. ``urllib`` by itself opens one for each."""

from __future__ import annotations

import contextlib
import http.client
import select
import threading
import time
import urllib.request
from collections.abc import Iterator

IDLE = 1.0
"""Seconds after which a kept connection is opened anew: well below the time after which servers close theirs."""
PLAIN = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class KeptConnections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """A handler for ``urllib``. Each thread has connections of its own, as it reads an answer after it got it; so has
    what goes through a proxy's tunnel."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[int, str, str], tuple[http.client.HTTPConnection, float]] = {}
        """The connections by thread, scheme and host, and when each was used last."""

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        if getattr(request, "_tunnel_host", None):
            return super().https_open(request)
        return self._open(request)

    def close(self) -> None:
        for connection, _ in self._kept.values():
            connection.close()
        self._kept.clear()

    def drop(self) -> None:
        """Closes those of this thread."""
        own = threading.get_ident()
        for key in [key for key in list(self._kept) if key[0] == own]:
            self._kept.pop(key)[0].close()

    def _open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        with self._connection(request) as connection:
            headers = {name.title(): value for name, value in {**request.unredirected_hdrs, **request.headers}.items()}
            connection.request(request.get_method(), request.selector, request.data, headers)
            response = connection.getresponse()
        response.url = request.full_url
        response.msg = response.reason  # type: ignore[assignment]  # as urllib's own handlers have it
        return response

    @contextlib.contextmanager
    def _connection(self, request: urllib.request.Request) -> Iterator[http.client.HTTPConnection]:
        """A kept or new connection, which is kept unless the request fails."""
        key = threading.get_ident(), request.type, request.host
        connection, used = self._kept.pop(key, (None, 0.0))
        if connection is None:
            connection = PLAIN[request.type](request.host, timeout=request.timeout or 0.0)
        elif time.monotonic() - used > IDLE or _is_readable(connection):
            connection.close()  # the next request opens it again
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._kept[key] = connection, time.monotonic()


def _is_readable(connection: http.client.HTTPConnection) -> bool:
    """Whether bytes are there that belong to no new answer: the end, or the rest of an answer that was not read."""
    return connection.sock is not None and bool(select.select([connection.sock], [], [], 0)[0])
