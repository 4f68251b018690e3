"""The keys that a server accepts: what its repository holds, kept in memory."""

from __future__ import annotations

import datetime
import hmac
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from jpets.access import Key, Limits, Scope, digest_of_key
from jpets.errors import NotFound, Unauthorized
from jpets.types import DEFAULT_TENANT
from serving.tenants.allowance import Allowance
from serving.tenants.asker import Asker

NOTHING = "0" * 64
"""Compared with a key of an unknown id, so that it takes the time of one with a wrong secret."""
REFUSAL = "the key is unknown, expired or revoked"


class Known(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def keys(self) -> Sequence[Key]: ...
    @property
    def limits(self) -> Mapping[str, Limits]: ...


class KeyStore(Protocol):
    """Where keys and limits are kept."""

    def create(
        self,
        tenant: str,
        scopes: Sequence[Scope],
        *,
        default_task: str | None = None,
        days: float | None = None,
        note: str = "",
    ) -> tuple[Key, str]:
        """A new key and its text. Raises ``InvalidInput``."""
        ...

    def revoke(self, id: str) -> Key:
        """Raises ``NotFound``."""
        ...

    def limit(self, tenant: str, limits: Limits) -> None:
        """Raises ``InvalidInput``."""
        ...

    def number(self) -> int:
        """Of the last change, by any writer."""
        ...

    def known(self) -> Known:
        """All keys, also revoked ones, and limits by tenant."""
        ...


class Held(NamedTuple):
    """A key that is accepted until the Unix time ``end``."""

    digest: str
    end: float
    asker: Asker


class Keyring:
    """A server with keys accepts no request without one; revoked ones count too. Without any, every request is for the
    default tenant and may do everything.

    ``asker`` may be called in one thread only, ``refresh`` in any.
    """

    def __init__(self, store: KeyStore | None = None) -> None:
        self._store = store
        self._refreshing = threading.Lock()
        self._seen = -1
        self._allowances: dict[str, Allowance] = {}
        self._held: Mapping[str, Held] = {}
        self._anonymous: Asker | None = Asker()
        """For whom requests without a key are; None where they need one."""
        if store is not None:
            self.refresh()

    @property
    def store(self) -> KeyStore:
        """Raises ``NotFound`` where there is none."""
        if self._store is None:
            raise NotFound("this server keeps no keys; start it by python -m jpets.serve --repository DIR")
        return self._store

    @property
    def required(self) -> bool:
        return self._anonymous is None

    def asker(self, given: str | None) -> Asker:
        """For whom a request with this key is. Raises ``Unauthorized``."""
        if (anonymous := self._anonymous) is not None:
            return anonymous
        if given is None:
            raise Unauthorized("a key is needed: send the header Authorization: Bearer KEY")
        held = self._held.get(given.partition("_")[2].partition("_")[0])
        right = hmac.compare_digest(digest_of_key(given), held.digest if held is not None else NOTHING)
        if held is None or not right or time.time() >= held.end:
            raise Unauthorized(REFUSAL)
        return held.asker

    def check(self, asker: Asker) -> None:
        """Raises ``Unauthorized`` where its key is not accepted any more."""
        if self.required:
            held = self._held.get(asker.key or "")
            if held is None or time.time() >= held.end:
                raise Unauthorized(REFUSAL)

    def refresh(self) -> None:
        """Reads the keys again if any have changed. Raises what the store does; then the keys stay as they were."""
        store = self.store
        with self._refreshing:
            if store.number() == self._seen:
                return
            found = store.known()
            named = (key.tenant for key in found.keys)
            allowances = {
                tenant: self._allowance(tenant, found.limits.get(tenant, Limits()))
                for tenant in {DEFAULT_TENANT, *named}
            }
            held = {key.id: _held(key, allowances[key.tenant]) for key in found.keys if key.revoked is None}
            self._seen, self._allowances, self._held = found.number, allowances, held
            own = allowances[DEFAULT_TENANT]
            if found.keys or self.required:  # a catalogue that lost its keys opens nothing
                self._anonymous = None
            else:
                self._anonymous = Asker(priority=own.limits.priority, allowance=own)

    def _allowance(self, tenant: str, limits: Limits) -> Allowance:
        """What was used stays used, unless the limits have changed."""
        before = self._allowances.get(tenant)
        return before if before is not None and before.limits == limits else Allowance(limits)


def _held(key: Key, allowance: Allowance) -> Held:
    end = float("inf") if key.expires is None else datetime.datetime.fromisoformat(key.expires).timestamp()
    asker = Asker(key.tenant, allowance.limits.priority, key.scopes, key.default_task, allowance, key.id)
    return Held(key.digest, end, asker)
