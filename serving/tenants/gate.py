"""Lets a request in: finds its key before anything else of it is read."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Scope

from jpets.errors import Forbidden, JpetsError, Unauthorized
from serving.http.errors import error_response, retry_headers
from serving.tenants.keyring import Keyring

OPEN = ("/v2/health/live", "/v2/health/ready", "/docs", "/docs/oauth2-redirect", "/openapi.json")
"""Paths that need no key: probes, and what the interface is."""
OPEN_FOLDER = "/static-offline-docs/"
PAGES = ("/", "/metrics")
"""Paths that browsers open, which ask people for a password: any name, and the key."""


class Gate:
    """Says for whom an HTTP request is, or why it is not let in."""

    def __init__(self, keyring: Keyring, *, local: bool = False) -> None:
        """``local``: only this machine reaches the server."""
        self._keyring = keyring
        self._local = local

    def admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        """Puts the ``Asker`` into the scope's state. 401 where a key is needed and there is none, 429 for a tenant over
        its limits."""
        if is_open(scope["path"]):
            return None
        page = scope["path"] in PAGES and scope["method"] in ("GET", "HEAD")
        try:
            asker = self._keyring.asker(key_of(headers, basic=page))
            if asker.key is None:
                if self._local:
                    _check_host(headers)
                if scope["method"] not in ("GET", "HEAD"):
                    _check_site(headers)
            asker.allowance.request()
        except JpetsError as error:
            more = retry_headers(error)
            if isinstance(error, Unauthorized):
                more["WWW-Authenticate"] = 'Basic realm="jpets"' if page else "Bearer"
            return error_response(scope, error.status, error.code, error.message, more)
        scope["state"]["asker"] = asker
        return None

    def accepts(self, scope: Scope) -> bool:
        """Whether the key of a request that was let in is accepted still."""
        asker = scope["state"].get("asker")
        try:
            if asker is not None:
                self._keyring.check(asker)
        except Unauthorized:
            return False
        return True


def _check_site(headers: Mapping[bytes, bytes]) -> None:
    """Raises ``Forbidden`` for what a page of another site sends: browsers let any page send to this machine, and a
    server without keys would take it for its owner's."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:  # browsers alone send it, over HTTPS and to this machine
        other = site not in (b"same-origin", b"none")
    else:
        other = origin is not None and origin.lower().partition(b"://")[2] != headers.get(b"host", b"").lower()
    if other:
        raise Forbidden(
            "this comes from a page of another site, which a server without keys does not take; serve that page and "
            "jpets under one host and port, by a proxy"
        )


def _check_host(headers: Mapping[bytes, bytes]) -> None:
    """Raises ``Forbidden`` where this machine is called by a name that the internet gives out: a page's own name may
    lead here from one moment to the next (DNS rebinding), and to a browser it is then the page's own server."""
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name in ("", "localhost") or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise Forbidden(
            f"Host: expected localhost or an address of this machine, found {name[:80]!r}, which a server without keys "
            "does not answer to; make a key (jpets key create), or start it with --insecure"
        ) from None


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_FOLDER)


def key_of(headers: Mapping[bytes, bytes], *, basic: bool = False) -> str | None:
    """The key in ``Authorization`` or ``X-API-Key``. ``basic``: as a password too, which browsers send by themselves:
    a page of somebody else could use it for more than reading pages."""
    how, _, value = headers.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    if how.lower() == "bearer":
        return value.strip()
    if basic and how.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except ValueError:  # not Base64, or not UTF-8
            return ""
    other = headers.get(b"x-api-key")
    return None if other is None else other.decode("latin-1").strip()
