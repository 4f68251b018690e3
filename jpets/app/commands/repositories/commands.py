"""``jpets repository``: back up a repository that servers use, and restore it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jpets.app.commands.app import App
from jpets.app.commands.output import busy
from jpets.app.commands.tasks.store import repository_option
from jpets.errors import InvalidInput

app = App(no_args_is_help=True, help="A repository as a whole: tasks and keys of all tenants.")
Repository = Annotated[Path, repository_option("folder of the repository, which may be in use")]


@app.command()
def backup(
    target: Annotated[
        Path, typer.Argument(file_okay=False, help="folder; an earlier backup there is brought up to date")
    ],
    repository: Repository,
) -> None:
    """Copy the repository, as it is at one moment, into a folder. A server can be started on that folder too."""
    from jpets.app.commands.tasks.repository_store import open_folder, open_repository

    _check_apart(repository, target)
    with open_repository(repository) as source, open_folder(target, create=True) as kept, busy("back up"):
        copied = source.copy_to(kept)
        kept.collect()
    typer.echo(f"{copied.versions} versions of tasks are in {target}; rows that changed: {copied.changed}")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="folder of a backup")],
    repository: Repository,
) -> None:
    """Make the tasks what they were at a backup. Only what differs is written, and running servers follow that within a
    second; what was uploaded since is gone. Keys that were made or revoked since stay so."""
    from jpets.app.commands.tasks.repository_store import open_folder, open_repository

    _check_apart(repository, source)
    with open_folder(source) as kept, open_repository(repository, create=True) as target, busy("restore"):
        copied = kept.copy_to(target)
        target.collect()
    typer.echo(f"{copied.versions} versions of tasks are back; rows that changed: {copied.changed}")


def _check_apart(repository: Path, backup: Path) -> None:
    """Raises ``InvalidInput``."""
    if repository.resolve() == backup.resolve():
        raise InvalidInput("the backup is the repository itself; name another folder")
