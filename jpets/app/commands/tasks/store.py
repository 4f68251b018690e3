"""Where tasks are kept, whatever keeps them: a repository's folder or a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import typer

from jpets.access import DEFAULT_TENANT
from jpets.app.commands.options import given_path, on_command_line
from serving.protocols.schemas import TaskDetail, TaskSummary, TaskVersion


def repository_option(help: str) -> Any:
    return typer.Option(envvar="JPETS_REPOSITORY", help=help, parser=given_path, metavar="<path>")


RepositoryOption = Annotated[
    Path | None, repository_option("folder of tasks; a running server sees changes within a second")
]
ServerOption = Annotated[
    str | None, typer.Option(envvar="JPETS_SERVER", help="URL of a running server, which sees changes at once")
]

OwnerOption = Annotated[
    str | None, typer.Option("--tenant", help="whose tasks, of a repository; a server takes the tenant of the key")
]


class Added(NamedTuple):
    """A version that was stored; ``preparing``: it waits for the programs of its shape."""

    id: str
    version: int
    bytes: int
    preparing: bool = False


class TaskStore(Protocol):
    """Every method raises ``NotFound`` for a task that is not there."""

    at_once: int
    """Tasks that are worth adding at a time: a disk makes sure of several files in the time of one."""

    def tasks(self) -> Iterator[TaskSummary]:
        """Every task, by id."""
        ...

    def get(self, id: str) -> TaskDetail: ...

    def versions(self, id: str) -> Iterator[TaskVersion]:
        """Every kept version, the oldest first."""
        ...

    def add(self, id: str, file: Path, if_match: int | None) -> Added:
        """A new version; ``if_match`` must be the newest one so far, 0 for none.

        Raises ``InvalidTask``, ``Conflict``, ``OutOfSpace``.
        """
        ...

    def read(self, id: str) -> bytes:
        """The task file of the version that is served."""
        ...

    def rollback(self, id: str, version: int | str | None) -> TaskDetail:
        """Serves ``version``, by default the one before the served one."""
        ...

    def alias(self, id: str, name: str, version: int | str | None) -> TaskDetail:
        """Points an alias at a version, given by number or alias; None: it is none any more."""
        ...

    def remove(self, id: str) -> None:
        """Removes every version."""
        ...


@contextlib.contextmanager
def open_store(
    context: typer.Context,
    repository: Path | None,
    server: str | None,
    tenant: str | None = None,
    *,
    create: bool = False,
) -> Iterator[TaskStore]:
    """The store in ``place_of``. ``create`` makes a repository where there is none. Raises ``typer.BadParameter`` for a
    tenant of a server."""
    place = place_of(context, repository, server)
    if isinstance(place, Path):
        from jpets.app.commands.tasks.repository_store import repository_store

        with repository_store(place, tenant or DEFAULT_TENANT, create=create) as store:
            yield store
    elif tenant is not None:
        raise typer.BadParameter("--tenant goes with --repository; a server takes the tenant of the key (JPETS_KEY)")
    else:
        from jpets.app.commands.client.client import Server
        from jpets.app.commands.tasks.server_store import ServerStore

        with Server(place) as kept:
            yield ServerStore(kept)


def place_of(context: typer.Context, repository: Path | None, server: str | None) -> Path | str:
    """A repository's folder or a server's URL, whichever a command was told. An option on the command line wins over
    the other one's variable. Raises ``typer.BadParameter`` unless exactly one was given."""
    given: Mapping[str, Path | str | None] = {"repository": repository, "server": server}
    named = [name for name in given if on_command_line(context, name)]
    chosen = named or [name for name, value in given.items() if value is not None]
    place = given[chosen[0]] if len(chosen) == 1 else None
    if place is None:
        raise typer.BadParameter(f"give exactly one of --repository DIR and --server URL, found {len(chosen)}")
    return place
