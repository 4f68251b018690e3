"""Keys and limits of tenants, in a repository's catalogue: servers that share it accept the same keys.

A key is ``jpets_<id>_<secret>``. The id finds its row, which holds only a digest of the whole key.
"""

from __future__ import annotations

import dataclasses
import datetime
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from checkpoints.catalog import ACCESS, KEYS, LIMITS, Catalog
from checkpoints.dialects import insert
from checkpoints.ids import check_id
from jpets.access import MOST_PRIORITY, SCOPES, Key, Limits, Scope, digest_of_key
from jpets.errors import InvalidInput, NotFound
from jpets.types import DEFAULT_TENANT
from jpets.watch import Watch

LONGEST_NOTE = 200
ONLY = {"row": 1}
"""The one row of ``ACCESS``."""


class Known(NamedTuple):
    """All keys, also revoked ones, and limits by tenant, as of change ``number``."""

    number: int
    keys: Sequence[Key]
    limits: Mapping[str, Limits]


class Access:
    """Thread-safe, and safe across processes."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def create(
        self,
        tenant: str = DEFAULT_TENANT,
        scopes: Sequence[Scope] = ("infer",),
        *,
        default_task: str | None = None,
        days: float | None = None,
        note: str = "",
    ) -> tuple[Key, str]:
        """A new key and its text, which cannot be had again. ``days`` until it expires, never by default.

        Raises ``InvalidInput``.
        """
        check_id(tenant, "tenant")
        if default_task is not None:
            check_id(default_task)
        if not scopes or not set(scopes) <= set(SCOPES):
            raise InvalidInput(f"scopes: expected some of {list(SCOPES)}, found {list(scopes)}")
        if days is not None and not 0 < days < 36500:
            raise InvalidInput(f"days: expected a number above 0 and below 36500, found {days:g}")
        if len(note) > LONGEST_NOTE or not note.isprintable():
            raise InvalidInput(f"note: expected at most {LONGEST_NOTE} printable characters, found {len(note)}")
        id, now = secrets.token_hex(6), datetime.datetime.now(datetime.UTC)
        text = f"jpets_{id}_{secrets.token_urlsafe(32)}"
        key = Key(
            id,
            tenant,
            tuple(scope for scope in SCOPES if scope in scopes),
            digest_of_key(text),
            _written(now),
            default_task,
            None if days is None else _written(now + datetime.timedelta(days=days)),
            note=note,
        )
        with self._catalog.write() as connection:
            connection.execute(sa.insert(KEYS).values(**_row(key)))
            count_change(connection)
        return key, text

    def revoke(self, id: str) -> Key:
        """No request is accepted with it from now on; one that was revoked before stays so. Raises ``NotFound``."""
        with self._catalog.write() as connection:
            mine = KEYS.c.id == id
            now = _written(datetime.datetime.now(datetime.UTC))
            connection.execute(sa.update(KEYS).where(mine, KEYS.c.revoked.is_(None)).values(revoked=now))
            row = connection.execute(sa.select(KEYS).where(mine)).first()
            if row is None:
                raise NotFound(f"no key {id[:64]!r}; list the keys to see what there is")
            count_change(connection)
            return _key(row)

    def limit(self, tenant: str, limits: Limits) -> None:
        """Replaces the limits of a tenant, which may have no tasks yet. Raises ``InvalidInput``."""
        check_id(tenant, "tenant")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if (value := getattr(limits, name)) is not None and not 0 < value < 1e12:
                raise InvalidInput(f"{name}: expected a number above 0 and below 1e12, found {value:g}")
        if not -MOST_PRIORITY <= limits.priority <= MOST_PRIORITY:
            raise InvalidInput(f"priority: expected -{MOST_PRIORITY} to {MOST_PRIORITY}, found {limits.priority}")
        with self._catalog.write() as connection:
            new = insert(connection, LIMITS).values(tenant=tenant, **dataclasses.asdict(limits))
            update = {name: new.excluded[name] for name in dataclasses.asdict(limits)}
            connection.execute(new.on_conflict_do_update(index_elements=["tenant"], set_=update))
            count_change(connection)

    def number(self) -> int:
        """Of the last change, by any writer."""
        with self._catalog.read() as connection:
            return connection.execute(sa.select(ACCESS.c.number)).scalar() or 0

    def watch(self) -> Watch:
        """A watch for changes of ``number``; it is told of them where the catalogue's database tells."""
        return self._catalog.watch(ACCESS)

    def known(self) -> Known:
        with self._catalog.read() as connection:
            number = connection.execute(sa.select(ACCESS.c.number)).scalar() or 0
            keys = connection.execute(sa.select(KEYS).order_by(KEYS.c.created, KEYS.c.id)).all()
            limits = connection.execute(sa.select(LIMITS).order_by(LIMITS.c.tenant)).all()
        return Known(number, [_key(row) for row in keys], {row.tenant: _limits(row) for row in limits})


def count_change(connection: sa.Connection) -> None:
    """Says that keys or limits have changed."""
    new = insert(connection, ACCESS).values(**ONLY, number=1)
    connection.execute(new.on_conflict_do_update(index_elements=["row"], set_={"number": ACCESS.c.number + 1}))


def _row(key: Key) -> dict[str, Any]:
    return {**dataclasses.asdict(key), "scopes": ",".join(key.scopes)}


def _key(row: sa.Row[Any]) -> Key:
    fields = dict(row._mapping)
    return Key(**{**fields, "scopes": tuple(fields["scopes"].split(","))})


def _limits(row: sa.Row[Any]) -> Limits:
    return Limits(row.requests_per_minute, row.tokens_per_minute, row.priority)


def _written(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
