"""``jpets task``: check, add, list, show, export, roll back and remove tasks, and list their versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jpets.app.commands.app import App
from jpets.app.commands.client.waiting import looks
from jpets.app.commands.options import refuse_options
from jpets.app.commands.output import JsonOption, busy, print_fields, print_json, print_table, report_error, size
from jpets.app.commands.tasks.eval import evaluate
from jpets.app.commands.tasks.files import TaskFiles, for_each, task_files
from jpets.app.commands.tasks.importing import import_task
from jpets.app.commands.tasks.report import TaskReport
from jpets.app.commands.tasks.store import Added, OwnerOption, RepositoryOption, ServerOption, TaskStore, open_store
from jpets.errors import EngineFailure, InvalidInput, InvalidTask
from serving.protocols.schemas import MOST_VERSIONS, TaskDetail, TaskSummary

CONTENT = ("methods", "head", "labels", "size")

app = App(no_args_is_help=True, help="The tasks of a repository's folder or of a running server.")

app.command("import")(import_task)
app.command("eval")(evaluate)

SHOWN_LABELS = 6
TaskFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="task file (.safetensors)")]
TaskId = Annotated[str, typer.Argument(metavar="ID", help="the task's id")]


@app.command()
def check(
    file: TaskFile,
    backbone: Annotated[
        str | None, typer.Option(envvar="JPETS_BACKBONE", help="backbone it must fit: folder, package or hub id")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a task file, and say what is in it. Exit code 1 where it cannot be served."""
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task

    loaded = None
    if backbone is not None:
        with busy("read backbone"):
            loaded = load_backbone(backbone)
    try:
        config, fingerprint = (loaded.config, loaded.fingerprint) if loaded is not None else (None, None)
        # The stem of a file need not be an id until it is added under it.
        task = read_task(file, id="checked", config=config, backbone=fingerprint)
    except InvalidTask as error:
        report = TaskReport.of_error(file, error)
    else:
        report = TaskReport.of_task(file, task, complete=loaded is not None)
    if as_json:
        print_json(report.to_dict())
    elif report.problems:
        report_error(f"{file.name}: {len(report.problems)} problem{'s' * (len(report.problems) > 1)}")
        for problem in report.problems:
            report_error(problem)
    else:
        print_fields(report.fields())
    if report.problems:
        raise typer.Exit(1)


@app.command()
def add(
    context: typer.Context,
    files: TaskFiles,
    id: Annotated[str | None, typer.Option(help="the task's id, of one file; the file's stem by default")] = None,
    if_match: Annotated[
        int | None, typer.Option(min=0, max=MOST_VERSIONS, help="the newest version must be this one, 0: none")
    ] = None,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
) -> None:
    """Add task files, each as a new version of the task that it is named after; one that is refused does not stop the
    others. A repository's folder does not know its backbone: check files with --backbone first."""
    found = task_files(files)
    if id is not None and len(found) > 1:
        raise typer.BadParameter(f"--id names one task, found {len(found)} files; rename them, or add each by itself")
    taken: dict[str, Path] = {}
    for file in found:
        taken.setdefault(file.stem, file)
    with open_store(context, repository, server, tenant, create=True) as store:

        def add_one(file: Path) -> Added:
            if id is None and (other := taken[file.stem]) != file:
                raise InvalidInput(f"expected each id once, {other} has this one too; add it by itself with --id")
            return store.add(id or file.stem, file, if_match)

        def tell(stored: Added) -> None:
            typer.echo(f"added {stored.id} version {stored.version} ({size(stored.bytes)})")
            if stored.preparing:
                _wait_until_served(store, stored.id)

        for_each(found, add_one, tell, store.at_once)


def _wait_until_served(store: TaskStore, id: str) -> None:
    """Waits for the programs of a shape that the server did not have yet. Raises the error that kept them from being
    made."""
    typer.echo(f"{id} waits for the programs of its shape, which the server compiles", err=True)
    with busy("compile programs"):
        task = next(task for task in looks(lambda: store.get(id)) if task.state != "preparing" or task.problem)
    if task.state == "preparing":
        raise EngineFailure(f"{id} is stored and not served yet, the server tries again: {task.problem}")
    if task.state == "failed":
        raise EngineFailure(f"{id} cannot be served: {task.problem}")
    typer.echo(f"{id} is served")


@app.command("list")
def list_tasks(
    context: typer.Context,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every task."""
    with open_store(context, repository, server, tenant) as store:
        found = list(store.tasks())
    if as_json:
        print_json([task.model_dump() for task in found])
        return
    several = len({task.tenant for task in found}) > 1
    rows = [(task.id, task.version, *_content(task), task.backbone, *[task.tenant] * several) for task in found]
    print_table(("id", "version", *CONTENT, "backbone", *["tenant"] * several), rows, numbers=("version", "size"))


@app.command()
def show(
    context: typer.Context,
    id: TaskId,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the version of a task that is served, and which there are."""
    with open_store(context, repository, server, tenant) as store:
        task = store.get(id)
    if as_json:
        print_json(task.model_dump())
    else:
        print_fields(_fields(task))


@app.command()
def versions(
    context: typer.Context,
    id: TaskId,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the versions of a task that are kept, the oldest first."""
    with open_store(context, repository, server, tenant) as store:
        found = list(store.versions(id))
    if as_json:
        print_json([version.model_dump() for version in found])
        return
    rows = [
        (version.version, "served" if version.served else version.state, *_content(version), version.created)
        for version in found
    ]
    print_table(("version", "state", *CONTENT, "uploaded"), rows, numbers=("version", "size"))


@app.command()
def export(
    context: typer.Context,
    id: TaskId,
    file: Annotated[Path, typer.Argument(dir_okay=False, help="where to write it; an existing file is replaced")],
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
) -> None:
    """Write the task file of the version that is served."""
    from jpets.files import write_atomic

    with open_store(context, repository, server, tenant) as store:
        content = store.read(id)
    write_atomic(file, content)
    typer.echo(f"exported {id} to {file} ({size(len(content))})")


@app.command()
def rollback(
    context: typer.Context,
    id: TaskId,
    version: Annotated[str | None, typer.Option(help="number or alias to serve; by default the version before")] = None,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
) -> None:
    """Serve an earlier version of a task."""
    with open_store(context, repository, server, tenant) as store:
        stored = store.rollback(id, None if version is None else _named(version))
    typer.echo(f"rolled {id} back to version {stored.version}")


@app.command()
def alias(
    context: typer.Context,
    id: TaskId,
    name: Annotated[str, typer.Argument(help="name of a version, such as stable")],
    version: Annotated[str, typer.Option(help="number, or another alias")] = "latest",
    remove: Annotated[bool, typer.Option("--remove", help="take the name back")] = False,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
) -> None:
    """Name a version of a task, which is then kept however many come after it."""
    if remove:
        refuse_options(context, ("version",), "only without --remove, which takes the name back")
    with open_store(context, repository, server, tenant) as store:
        found = store.alias(id, name, None if remove else _named(version))
    named = found.aliases.get(name, version)  # a catalogue that is busy by then tells no aliases
    typer.echo(f"{name} names no version of {id}" if remove else f"{name} is version {named} of {id}")


@app.command()
def remove(
    context: typer.Context,
    id: TaskId,
    repository: RepositoryOption = None,
    tenant: OwnerOption = None,
    server: ServerOption = None,
) -> None:
    """Remove a task with all its versions."""
    with open_store(context, repository, server, tenant) as store:
        store.remove(id)
    typer.echo(f"removed {id}")


def _named(version: str) -> int | str:
    """A number, or an alias. Raises ``typer.BadParameter``."""
    if not version.isdecimal():
        return version
    if len(version) > 10 or not 1 <= int(version) <= MOST_VERSIONS:
        raise typer.BadParameter(f"--version: expected 1 to {MOST_VERSIONS}, or an alias")
    return int(version)


def _version(number: int | None) -> str:
    return "no version" if number is None else f"version {number}"


def _fields(task: TaskDetail) -> list[tuple[str, object]]:
    return [
        ("id", task.id),
        ("version", task.version),
        ("served", _version(task.served)),
        ("loaded", _version(task.loaded)),
        ("versions", ", ".join(map(str, task.versions))),
        ("aliases", ", ".join(f"{name} {version}" for name, version in sorted(task.aliases.items())) or "none"),
        ("backbone", f"{task.backbone} {task.metadata.get('backbone', {}).get('fingerprint', '')}"),
        ("methods", task.methods or "none"),
        ("differs", _where(task.metadata)),
        ("head", task.head),
        ("labels", ", ".join(task.labels) or "none"),
        ("size", f"{size(task.bytes)} ({task.bytes} bytes)"),
        ("digest", task.digest),
        ("uploaded", task.created),
        *((name, task.metadata[name]) for name in ("license", "description") if task.metadata.get(name)),
    ]


def _where(document: Mapping[str, Any]) -> str:
    """From which layer on a task differs from its backbone: tasks share the layers below on one text."""
    deltas = document.get("deltas", ())
    first = min((_first_layer(delta) for delta in deltas), default=None)
    return "in its head alone" if first is None else f"from layer {first} on, of {document['backbone']['layers']}"


def _first_layer(delta: Mapping[str, Any]) -> int:
    """As ``Method.first_layer``, of what the file says."""
    outside = any(str(site).startswith("embeddings") for site in delta.get("sites", ()))
    return 0 if outside else min(delta.get("layers") or [0])


def _content(task: TaskSummary) -> tuple[str, ...]:
    """What a table says of a version, under ``CONTENT``."""
    return task.methods or "none", task.head, _labels(task.labels), size(task.bytes)


def _labels(labels: list[str]) -> str:
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    return ", ".join(labels[:SHOWN_LABELS]) + more
