"""Two servers on one repository for the tests of a file; each test leaves them with one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server_pair import Server, make_server

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.types import Task
from serving.http.settings import ServingSettings


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, validator: Any, make_task: Callable[..., Task]
) -> Iterator[tuple[Server, Server]]:
    """Both know ``always``."""
    folder, cache = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("cache")
    settings = ServingSettings(upload_folder=tmp_path_factory.mktemp("uploads"))
    repository = Repository(folder, validator=validator)
    repository.put("always", task_to_bytes(make_task("always")))
    repository.close()
    made = [make_server(folder, backbone, validator, cache, settings) for _ in range(2)]
    yield made[0], made[1]
    for server in made:
        server.services.close()
        server.repository.close()


@pytest.fixture(autouse=True)
def tidy(servers: tuple[Server, Server]) -> Iterator[None]:
    yield
    first, second = servers
    for stored in first.repository.list()[0]:
        if stored.id != "always":
            first.repository.delete(stored.id)
    for server in servers:
        server.service.following.refresh()
    assert first.tells(["always"]) == second.tells(["always"])
