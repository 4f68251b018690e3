"""The owner of a storage: ``collect`` removes blobs that its catalogue does not name, so two may never share one."""

from __future__ import annotations

import uuid

import sqlalchemy as sa

from checkpoints.blobs import Blobs
from checkpoints.catalog import VERSIONS, Catalog
from jpets.errors import InvalidInput

OWN = sa.MetaData()
IDENTITY = sa.Table("identity", OWN, sa.Column("name", sa.String(32), primary_key=True))
"""One row. It exists only for a catalogue or blobs with a URL: a folder has a single repository."""


def claim(catalog: Catalog, blobs: Blobs) -> None:
    """Marks a storage as that of this catalogue. Raises ``InvalidInput`` if it is another one's."""
    with catalog.read() as connection:
        named = sa.inspect(connection).has_table(IDENTITY.name)
        identity = connection.execute(sa.select(IDENTITY.c.name)).scalar() if named else None
        has_tasks = connection.execute(sa.select(VERSIONS.c.digest).limit(1)).scalar() is not None
    if identity is None:
        identity = _named(catalog)
    owner = blobs.owner()
    if owner is None and (has_tasks or next(iter(blobs.list()), None) is None):
        blobs.own(identity)
        owner = blobs.owner()  # another catalogue may have been as fast
    if owner != identity:
        raise InvalidInput(
            "the storage of task files belongs to another catalogue, whose files would be removed as unknown; "
            "give each catalogue a storage of its own (--blobs)"
        )


def _named(catalog: Catalog) -> str:
    """The catalogue's identity, made now unless another process has just made it."""
    with catalog.write() as connection:
        OWN.create_all(connection)
        found: str | None = connection.execute(sa.select(IDENTITY.c.name)).scalar()
        if found is None:
            found = uuid.uuid4().hex
            connection.execute(IDENTITY.insert().values(name=found))
        return found
