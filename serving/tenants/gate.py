"""Lets a request in: finds its key before anything else of it is read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from jpets.errors import JpetsError, Unauthorized
from serving.http.errors import error_response, retry_headers
from serving.tenants.keyring import Keyring

OPEN = ("/v2/health/live", "/v2/health/ready", "/docs", "/docs/oauth2-redirect", "/openapi.json")
"""Paths that need no key: probes, and what the interface is."""
OPEN_FOLDER = "/static-offline-docs/"
PAGES = ("/", "/metrics")
"""Paths that browsers open, which ask people for a password: any name, and the key."""


class Gate:
    """Answers 401 to a request without a key where one is needed, and 429 to one of a tenant over its limits. Others
    have their ``Asker`` in the scope's state."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            try:
                asker = self._keyring.asker(key_of(dict(scope["headers"])))
                asker.allowance.request()
            except JpetsError as error:
                headers = retry_headers(error)
                if isinstance(error, Unauthorized):
                    headers["WWW-Authenticate"] = 'Basic realm="jpets"' if scope["path"] in PAGES else "Bearer"
                response = error_response(scope, error.status, error.code, error.message, headers)
                await response(scope, receive, send)
                return
            scope["state"]["asker"] = asker
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_FOLDER)


def key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The key in ``Authorization`` (Bearer, or the password of Basic) or ``X-API-Key``."""
    how, _, value = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    if how.lower() == "bearer":
        return value.strip()
    if how.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    other = headers.get(b"x-api-key")
    return None if other is None else other.decode("latin-1").strip()
