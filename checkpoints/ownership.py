"""The owner of a storage: ``collect`` removes blobs that its catalogue does not name, so two may never share one."""

from __future__ import annotations

import uuid
from pathlib import Path

import sqlalchemy as sa

from checkpoints.blobs import Blobs
from checkpoints.catalog import VERSIONS, Catalog
from jpets.errors import InvalidInput

OWN = sa.MetaData()
IDENTITY = sa.Table("identity", OWN, sa.Column("name", sa.String(32), primary_key=True))
"""One row. It exists only for a catalogue or blobs with a URL: a folder has a single repository."""
ADVICE = "give each catalogue a storage of its own (--blobs), and a storage its own catalogue (--catalogue)"


def claim(catalog: Catalog, blobs: Blobs) -> None:
    """Makes a storage that has no owner that of this catalogue, if the catalogue knows all files in it."""
    identity = _named(catalog)
    if blobs.owner() is None:
        with catalog.read() as connection:
            known = set(connection.execute(sa.select(VERSIONS.c.digest).distinct()).scalars())
        unknown = sum(digest not in known for digest in blobs.list())
        if unknown:
            raise InvalidInput(
                f"the storage of task files has files that the catalogue does not know ({unknown}), and that would be "
                f"removed; {ADVICE}"
            )
        blobs.own(identity)


def catalog_of(folder: Path, blobs: Blobs) -> Catalog:
    """The catalogue in a repository's folder. Raises ``InvalidInput`` where it is lost: a new one would know none of
    the task files, and they would be removed."""
    file = folder / "catalog.sqlite"
    if not file.exists() and blobs.owner() is None:
        count = sum(1 for _ in blobs.list())
        if count and not file.exists():  # another process may just have made both, the catalogue first
            raise InvalidInput(
                f"the repository's folder has task files ({count}) and no {file.name} that knows them, so that they "
                "would be removed; put it back, or move the folder blobs away and restore a backup"
            )
    return Catalog(file)


def check_owner(connection: sa.Connection, blobs: Blobs) -> None:
    """Raises ``InvalidInput`` for a storage of another catalogue than the one that is connected."""
    owner = blobs.owner()
    if owner is not None and owner != _identity(connection):
        raise InvalidInput(
            "the storage of task files belongs to another catalogue, whose files would be removed as unknown; " + ADVICE
        )


def _identity(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table(IDENTITY.name):
        return None
    found: str | None = connection.execute(sa.select(IDENTITY.c.name)).scalar()
    return found


def _named(catalog: Catalog) -> str:
    """The catalogue's identity, made now unless it has one."""
    with catalog.read() as connection:
        found = _identity(connection)
    if found is not None:
        return found
    with catalog.write() as connection:
        OWN.create_all(connection)
        found = _identity(connection)
        if found is None:
            found = uuid.uuid4().hex
            connection.execute(IDENTITY.insert().values(name=found))
        return found
