"""Tasks of a running server, over ``/v1/tasks``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

from checkpoints.ids import check_id
from jpets.app.commands.client.client import Server
from jpets.app.commands.tasks.store import Added
from serving.protocols.schemas import TaskDetail, TaskPage, TaskSummary, TaskVersion, VersionPage

TASKS = "/v1/tasks"
PAGE = 500


class ServerStore:
    """A ``TaskStore``. The server checks files against its backbone, as many at a time as come here."""

    at_once = 4

    def __init__(self, server: Server) -> None:
        self._server = server

    def tasks(self) -> Iterator[TaskSummary]:
        after: str | None = None
        while True:
            asked = {"limit": PAGE} | ({"after": after} if after is not None else {})
            page = self._server.ask(TaskPage, "GET", f"{TASKS}?{urlencode(asked)}")
            yield from page.tasks
            after = page.next
            if after is None:
                return

    def get(self, id: str) -> TaskDetail:
        return self._server.ask(TaskDetail, "GET", _path(id))

    def versions(self, id: str) -> Iterator[TaskVersion]:
        after: int | None = 0
        while after is not None:
            asked = urlencode({"limit": PAGE, "after": after})
            page = self._server.ask(VersionPage, "GET", f"{_path(id)}/versions?{asked}")
            yield from page.versions
            after = page.next

    def add(self, id: str, file: Path, if_match: int | None) -> Added:
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        stored = self._server.upload(TaskDetail, _path(id), file, headers)
        return Added(stored.id, stored.version, stored.bytes, stored.state == "preparing")

    def read(self, id: str) -> bytes:
        return self._server.download(f"{_path(id)}/file")

    def rollback(self, id: str, version: int | str | None) -> TaskDetail:
        return self._server.ask(TaskDetail, "POST", f"{_path(id)}/rollback", {"version": version})

    def alias(self, id: str, name: str, version: int | str | None) -> TaskDetail:
        path = f"{_path(id)}/aliases/{quote(name, safe='')}"
        if version is None:
            return self._server.ask(TaskDetail, "DELETE", path)
        return self._server.ask(TaskDetail, "PUT", path, {"version": version})

    def remove(self, id: str) -> None:
        self._server.delete(_path(id))


def _path(id: str) -> str:
    return f"{TASKS}/{quote(check_id(id), safe='')}"
