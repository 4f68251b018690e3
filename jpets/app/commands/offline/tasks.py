"""The tasks of an offline run, wherever they are: a file, a folder of files, a repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from checkpoints.backbone import Backbone
from checkpoints.blobs import digest_of
from checkpoints.task_file import read_bytes, read_task
from checkpoints.versions import StoredTask
from jpets.access import DEFAULT_TENANT
from jpets.app.commands.tasks.repository_store import CATALOG, open_folder, open_repository
from jpets.errors import InvalidInput, JpetsError, NotFound
from jpets.types import Task
from serving.options.sources import PREFIX

PATTERN = "*.safetensors"


class TaskSet(NamedTuple):
    """Tasks by id, and the digests of their files."""

    tasks: Mapping[str, Task]
    digests: Mapping[str, str]


def load_tasks(place: Path, backbone: Backbone, tenant: str | None = None) -> TaskSet:
    """Every task of ``place``; of a repository those of the backbone, as others may have tasks there too, that a
    ``tenant`` may ask, its own before shared ones. Raises ``NotFound`` where there is none, ``InvalidTask`` naming the
    task, ``InvalidInput`` for a tenant of what is no repository."""
    tasks, digests = {}, {}
    for id, read in _files(place, backbone.fingerprint, tenant):
        try:
            content = read()
            tasks[id] = read_task(content, id=id, config=backbone.config, backbone=backbone.fingerprint)
        except JpetsError as error:
            raise type(error)(f"task {id}: {error.message}") from error
        digests[id] = digest_of(content)
    if not tasks:
        raise NotFound(
            f"{place} holds no tasks of backbone {backbone.name!r}; expected task files ({PATTERN}) or a repository"
        )
    return TaskSet(MappingProxyType(tasks), MappingProxyType(digests))


def _files(place: Path, fingerprint: str, tenant: str | None) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(id, what reads the task file), by id."""
    own = (place / CATALOG).is_file()
    elsewhere = place.is_dir() and not any(place.glob(PATTERN)) and os.environ.get(PREFIX + "CATALOGUE")
    if own or elsewhere:
        with open_folder(place) if own else open_repository(place) as repository:
            if tenant is not None and tenant not in (DEFAULT_TENANT, *repository.tenants()):
                raise NotFound(f"tenant {tenant!r} has no tasks in {place}")
            found: dict[str, StoredTask] = {}
            for owner in dict.fromkeys((DEFAULT_TENANT, tenant or DEFAULT_TENANT)):
                found |= {stored.id: stored for stored in repository.every(owner)}
            for id, stored in sorted(found.items()):
                if stored.metadata["backbone"]["fingerprint"] == fingerprint:
                    yield id, partial(repository.read, stored)
    elif tenant is not None:
        raise InvalidInput(f"a tenant has tasks in a repository, and {place} is none; leave --tenant out")
    else:
        for file in sorted(place.glob(PATTERN)) if place.is_dir() else [place]:
            yield file.stem, partial(read_bytes, file)
