"""Where keys and limits are kept, whatever keeps them: a repository's folder or a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import typer

from checkpoints.access import Access
from checkpoints.ids import check_id
from jpets.access import Limits, Scope
from jpets.app.commands.client.client import Server
from jpets.app.commands.tasks.repository_store import open_repository
from jpets.app.commands.tasks.store import place_of
from serving.protocols.schemas import KeyItem, KeyList, NewKey, TenantItem, TenantList

KEYS, TENANTS = "/v1/keys", "/v1/tenants"


class AccessStore(Protocol):
    def create(self, tenant: str, scopes: Sequence[Scope], **how: Any) -> NewKey:
        """Raises ``InvalidInput``."""
        ...

    def keys(self) -> Sequence[KeyItem]: ...

    def revoke(self, id: str) -> KeyItem:
        """Raises ``NotFound``."""
        ...

    def tenants(self) -> Sequence[TenantItem]:
        """Those that have limits, and maybe others."""
        ...

    def limit(self, tenant: str, limits: Limits) -> TenantItem:
        """Raises ``InvalidInput``."""
        ...


class RepositoryAccess:
    """An ``AccessStore`` in a repository's catalogue."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def create(self, tenant: str, scopes: Sequence[Scope], **how: Any) -> NewKey:
        return NewKey.made(*self._access.create(tenant, scopes, **how))

    def keys(self) -> Sequence[KeyItem]:
        return [KeyItem.of(key) for key in self._access.known().keys]

    def revoke(self, id: str) -> KeyItem:
        return KeyItem.of(self._access.revoke(id))

    def tenants(self) -> Sequence[TenantItem]:
        known = self._access.known()
        return TenantList.of(known.keys, known.limits).tenants

    def limit(self, tenant: str, limits: Limits) -> TenantItem:
        self._access.limit(tenant, limits)
        return TenantItem.of(tenant, limits)


class ServerAccess:
    """An ``AccessStore`` of a running server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def create(self, tenant: str, scopes: Sequence[Scope], **how: Any) -> NewKey:
        return self._server.ask(NewKey, "POST", KEYS, {"tenant": tenant, "scopes": list(scopes), **how})

    def keys(self) -> Sequence[KeyItem]:
        return self._server.ask(KeyList, "GET", KEYS).keys

    def revoke(self, id: str) -> KeyItem:
        return self._server.ask(KeyItem, "DELETE", f"{KEYS}/{quote(id, safe='')}")

    def tenants(self) -> Sequence[TenantItem]:
        return self._server.ask(TenantList, "GET", TENANTS).tenants

    def limit(self, tenant: str, limits: Limits) -> TenantItem:
        path = f"{TENANTS}/{quote(check_id(tenant, 'tenant'), safe='')}"
        return self._server.ask(TenantItem, "PUT", path, vars(limits))


@contextlib.contextmanager
def open_access(
    context: typer.Context, repository: Path | None, server: str | None, *, create: bool = False
) -> Iterator[AccessStore]:
    """``open_store`` for keys and limits."""
    place = place_of(context, repository, server)
    if isinstance(place, Path):
        with open_repository(place, create=create) as opened:
            yield RepositoryAccess(opened.access)
    else:
        with Server(place) as kept:
            yield ServerAccess(kept)
