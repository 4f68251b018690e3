"""Who may ask a server for what: keys, their scopes, and the limits of tenants."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Literal, get_args

DEFAULT_TENANT = "default"
"""Owner of what is made without a key. Its tasks are shared with all tenants."""
Scope = Literal["infer", "manage", "metrics", "admin"]
"""``infer``: queries. ``manage``: the tenant's tasks and jobs. ``metrics``: the figures of the whole server. ``admin``:
those too, keys, limits, backbones and domains."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
MOST_PRIORITY = 100
"""Of a tenant; the least is this below zero."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What is kept of a key; times are ISO 8601, UTC. Its secret is known only by ``digest``, a SHA-256."""

    id: str
    tenant: str
    scopes: tuple[Scope, ...]
    digest: str
    created: str
    default_task: str | None = None
    """The task of requests that name none."""
    expires: str | None = None
    revoked: str | None = None
    note: str = ""
    """For people."""


def digest_of_key(text: str) -> str:
    """What is kept of a key's text: it has 256 random bits, so that a slow hash would add nothing."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one tenant at one server; None: no limit. Queries of a higher ``priority`` go before all others."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    priority: int = 0
