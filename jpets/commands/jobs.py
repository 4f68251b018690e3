"""``jpets jobs``: training jobs of a running server; and how ``jpets train`` starts one there."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jpets.commands.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.commands.output import JsonOption, print_fields, print_json, print_table, progress_bars, shown
from jpets.errors import InvalidInput
from serving.schemas import JobItem, JobPage

app = typer.Typer(no_args_is_help=True, help="Training jobs of a running server; jpets train --task starts one.")

PATH = "/v1/jobs"
PAGE = 500
WAIT = 0.3
"""Seconds between looks at a job that runs."""
FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
Id = Annotated[str, typer.Argument(help="id of the job, as the list has it")]


@app.command("list")
def list_jobs(server: ServerUrl = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """List the jobs, the newest first."""
    items = list(_jobs(Server(server)))
    if as_json:
        print_json([item.model_dump() for item in items])
        return
    rows = [(item.id, item.task, item.method, item.state, _done(item)) for item in items]
    print_table(("job", "task", "method", "state", ""), rows)


@app.command()
def show(id: Id, server: ServerUrl = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show a job's state, progress and scores."""
    print_job(_job(Server(server), id), as_json)


@app.command()
def log(id: Id, server: ServerUrl = DEFAULT_SERVER) -> None:
    """Print what a job's processes noted."""
    typer.echo(shown(Server(server).download(f"{_path(id)}/log").decode(errors="replace")), nl=False)


@app.command()
def cancel(id: Id, server: ServerUrl = DEFAULT_SERVER) -> None:
    """Cancel a job, which then publishes nothing; or remove one that has finished. A task that it published stays."""
    here = Server(server)
    item = _job(here, id)
    here.delete(_path(id))
    typer.echo(f"{id} is removed" if item.is_finished else f"{id} is cancelled")


def start_job(server: Server, options: Mapping[str, Any], data: Path) -> JobItem:
    """Sends labelled texts to be trained on. Raises ``InvalidInput`` for a file of an unknown kind."""
    if data.suffix.lower() not in FORMATS:
        raise InvalidInput(f"{data.name}: expected a file that ends in one of {sorted(FORMATS)}")
    asked = {"format": FORMATS[data.suffix.lower()], **options}
    query = {
        name: json.dumps(value) if isinstance(value, (dict, bool)) else value
        for name, value in asked.items()
        if value is not None
    }
    return server.upload(JobItem, f"{PATH}?{urllib.parse.urlencode(query)}", data, {}, method="POST")


def follow(server: Server, item: JobItem) -> JobItem:
    """Shows a job's progress until it has finished; it goes on without who looks. Raises ``InvalidInput`` where it
    fails."""
    with progress_bars() as bars:
        bar = bars.add_task(item.id, total=None)
        while not item.is_finished:
            time.sleep(WAIT)
            item = _job(server, item.id)
            if (at := item.progress) is not None:
                bars.update(bar, completed=at.step, total=at.of, description=f"{item.method}, {_done(item)}")
    if item.state != "succeeded":
        raise InvalidInput(f"{item.id} {item.state}: {item.problem or 'somebody cancelled it'}")
    return item


def print_job(item: JobItem, as_json: bool) -> None:
    if as_json:
        print_json(item.model_dump())
        return
    fields = [("job", item.id), ("state", item.state), ("task", item.task), ("backbone", item.backbone)]
    fields += [("method", item.method), ("created", item.created)]
    if (done := _done(item)) is not None:
        fields.append(("done", done))
    if item.held_out_loss is not None:
        fields.append(("held-out loss", f"{item.held_out_loss:.4f}"))
    print_fields([*fields, *((name, f"{score:.4f}") for name, score in item.scores.items() if score is not None)])


def _done(item: JobItem) -> str:
    """What a job did so far, in a few words."""
    if item.version is not None:
        return f"version {item.version}"
    if item.problem is not None:
        return item.problem
    if (at := item.progress) is None:
        return ""
    return f"step {at.step}/{at.of}" + (f", loss {at.loss:.3f}" if at.loss is not None else "")


def _jobs(server: Server) -> Iterator[JobItem]:
    after: str | None = None
    while True:
        asked = {"limit": PAGE} | ({"after": after} if after is not None else {})
        page = server.ask(JobPage, "GET", f"{PATH}?{urllib.parse.urlencode(asked)}")
        yield from page.jobs
        after = page.next
        if after is None:
            return


def _job(server: Server, id: str) -> JobItem:
    return server.ask(JobItem, "GET", _path(id))


def _path(id: str) -> str:
    return f"{PATH}/{urllib.parse.quote(id, safe='')}"
