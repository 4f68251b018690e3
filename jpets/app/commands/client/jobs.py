"""``jpets jobs``: jobs of a running server; and how ``jpets train`` starts one there."""

from __future__ import annotations

import json
import tempfile
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.app.commands.app import App
from jpets.app.commands.client.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.app.commands.client.waiting import looks
from jpets.app.commands.options import named
from jpets.app.commands.output import (
    JsonOption,
    busy,
    print_fields,
    print_json,
    print_table,
    print_warning,
    progress_bars,
    shown,
)
from jpets.errors import InvalidInput
from serving.protocols.schemas import JobItem, JobPage

if TYPE_CHECKING:
    from jpets.training.data import Columns

app = App(no_args_is_help=True, help="Jobs of a running server; jpets train --task starts one that trains a task.")

PATH, DOMAINS, STUDENTS = "/v1/jobs", "/v1/domains", "/v1/students"
EXTRACT, PRETRAIN = f"{PATH}/extract", f"{PATH}/further-pretrain"
PAGE = 500
FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
UNLABELLED = FORMATS | {".txt": "txt"}
"""Of texts without labels."""
FORMATS_OF = {
    PATH: FORMATS | {".zip": "zip"},
    EXTRACT: {".zip": "zip"},
    PRETRAIN: UNLABELLED,
    DOMAINS: UNLABELLED,
    STUDENTS: FORMATS | {".zip": "zip"},
}
PACKED = (".json", ".safetensors", ".bin", ".txt", ".model")
"""Files of a checkpoint's folder that are read."""
Id = Annotated[str, typer.Argument(help="id of the job, as the list shows it")]


@app.command("list")
def list_jobs(server: ServerUrl = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """List the jobs, the newest first."""
    items = list(_jobs(Server(server)))
    if as_json:
        print_json([item.model_dump() for item in items])
        return
    rows = [(item.id, item.kind, item.makes, item.method or "", item.state, _done(item)) for item in items]
    print_table(("job", "kind", "makes", "method", "state", ""), rows)


@app.command()
def show(id: Id, server: ServerUrl = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show a job's state, progress and scores."""
    print_job(_job(Server(server), id), as_json)


@app.command()
def log(id: Id, server: ServerUrl = DEFAULT_SERVER) -> None:
    """Print a job's log."""
    typer.echo(shown(Server(server).download(f"{_path(id)}/log").decode(errors="replace")), nl=False)


@app.command()
def cancel(id: Id, server: ServerUrl = DEFAULT_SERVER) -> None:
    """Cancel a job, which then publishes nothing; or remove one that has finished. A task that it published stays."""
    here = Server(server)
    item = _job(here, id)
    here.delete(_path(id))
    typer.echo(f"{id} is removed" if item.is_finished else f"{id} is cancelled")


@app.command()
def extract(
    source: Annotated[Path, typer.Argument(exists=True, help="folder of a fully fine-tuned model, or a .zip of one")],
    task: Annotated[str, typer.Argument(help="id to publish the task under")],
    method: Annotated[str, typer.Option(help="bitfit, diff, lora, onebit, or auto: the smallest that agrees")],
    option: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, as rank=16, density=0.01 or labels=negative,positive")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="one of the server's; by default its first")] = None,
    texts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="texts on which answers are compared")
    ] = None,
    server: ServerUrl = DEFAULT_SERVER,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="follow the job to its end")] = True,
    as_json: JsonOption = False,
) -> None:
    """Have a server extract a task from a fully fine-tuned model, and publish it: jpets task import says what a method
    keeps."""
    asks = Server(server)
    asked = {"task": task, "method": method, "backbone": backbone, "texts": texts.name if texts is not None else None}
    with tempfile.TemporaryDirectory(prefix="jpets-") as folder:
        with busy("pack"):
            packed = pack(source, texts, Path(folder) / "model.zip")
        item = start_job(asks, asked | named(option or []), packed, EXTRACT)
    print_job(follow(asks, item) if wait else item, as_json)


@app.command()
def pretrain(
    data: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=".txt, .csv, .tsv, .jsonl or .parquet")],
    name: Annotated[str, typer.Argument(help="name of the new backbone")],
    option: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, as epochs=3, layers=4,5 or text=column")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="one of the server's; by default its first")] = None,
    server: ServerUrl = DEFAULT_SERVER,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="follow the job to its end")] = True,
    as_json: JsonOption = False,
) -> None:
    """Have a server train layers of a backbone further on texts without labels, as a new backbone in its folder."""
    asks = Server(server)
    item = start_job(asks, {"name": name, "backbone": backbone} | named(option or []), data, PRETRAIN)
    print_job(follow(asks, item) if wait else item, as_json)


@app.command()
def domain(
    data: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=".txt, .csv, .tsv, .jsonl or .parquet")],
    name: Annotated[str, typer.Argument(help="name of the domain; one of that name is replaced")],
    option: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, as epochs=3, share=0.3 or text=column")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="one of the server's; by default its first")] = None,
    server: ServerUrl = DEFAULT_SERVER,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="follow the job to its end")] = True,
    as_json: JsonOption = False,
) -> None:
    """Have a server add a domain to its backbone's tables, from texts of it: jpets plot domain says what that is."""
    asks = Server(server)
    item = start_job(asks, {"domain": name, "backbone": backbone} | named(option or []), data, DOMAINS)
    print_job(follow(asks, item) if wait else item, as_json)


@app.command()
def students(
    data: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=".csv, .tsv, .jsonl or .parquet")],
    task: Annotated[str, typer.Argument(help="id to publish the group under")],
    teacher: Annotated[str, typer.Option(help="task of the server that the group learns from")],
    backbone: Annotated[
        list[str],
        typer.Option(help="shallow backbone that the server has loaded; of several, the one that students train takes"),
    ],
    validation: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="held-out texts; by default some of DATA")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="more texts to learn from, without labels")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, as most=3, boosting=false or label=column")
    ] = None,
    server: ServerUrl = DEFAULT_SERVER,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="follow the job to its end")] = True,
    as_json: JsonOption = False,
) -> None:
    """Have a server train a group of students from one of its tasks, and publish it: jpets students train says what
    that is."""
    asks, (first, *others) = Server(server), backbone
    asked = {"task": task, "teacher": teacher, "backbone": first, "other_backbones": ",".join(others) or None}
    with tempfile.TemporaryDirectory(prefix="jpets-") as folder:
        sent = _pack_sides({"train": data, "validation": validation, "texts": texts}, Path(folder) / "texts.zip")
        item = start_job(asks, asked | named(option or []), sent, STUDENTS)
    print_job(follow(asks, item) if wait else item, as_json)


def pack(source: Path, texts: Path | None, target: Path) -> Path:
    """A zip archive of a folder's files (an archive as it is), with the texts beside them. Raises ``InvalidInput``."""
    if source.is_file():
        if texts is not None:
            raise InvalidInput(
                "--texts: an archive is sent as it is; put the texts into it and name them by --set texts="
            )
        return source
    from checkpoints.sentence import MODULES

    files = [path for path in sorted(source.glob("*")) if path.suffix in PACKED]
    if (source / MODULES).is_file():  # of Sentence-Transformers, which has a folder for each module
        files += [path for path in sorted(source.glob("*/*")) if path.suffix in PACKED]
    with zipfile.ZipFile(target, "w") as archive:  # tensors hardly shrink
        for path in filter(Path.is_file, files):
            archive.write(path, path.relative_to(source))
        if texts is not None:
            archive.write(texts, texts.name)
    return target


def texts_to_send(data: Path, validation: Path | None, columns: Columns, folder: Path) -> Path:
    """The texts as one file that a job takes. Of a folder of the ``datasets`` library these columns are written to a
    file in ``folder``, an archive where there are held-out texts. Raises ``InvalidInput``."""
    from jpets.training.data import read_examples

    names = (columns.text, columns.text_pair, columns.label)

    def as_file(path: Path, side: str) -> Path:
        if not path.is_dir():
            return path
        made = folder / f"{side}.jsonl"
        with made.open("w", encoding="utf-8") as file:
            for each in read_examples(path, columns):
                values = zip(names, (each.text, each.text_pair, each.label), strict=True)
                record = {name: value for name, value in values if name is not None}
                file.write(json.dumps(record, default=str) + "\n")  # labels are told apart by how they are written
        return made

    sides = {"train": as_file(data, "train")}
    if validation is not None:
        sides["validation"] = as_file(validation, "validation")
    return _pack_sides(sides, folder / "texts.zip")


def _pack_sides(sides: Mapping[str, Path | None], target: Path) -> Path:
    """An archive of the files that are there, by the names of the sides; of a single one that file. Raises
    ``InvalidInput``."""
    given = {name: path for name, path in sides.items() if path is not None}
    if len(given) == 1:
        return next(iter(given.values()))
    for name, path in given.items():
        _format(path, UNLABELLED if name == "texts" else FORMATS)
    with zipfile.ZipFile(target, "w") as archive:
        for name, path in given.items():
            archive.write(path, f"{name}{path.suffix.lower()}")
    return target


def start_job(server: Server, options: Mapping[str, Any], data: Path, path: str = PATH) -> JobItem:
    """Sends a job's data to where jobs of its kind are asked for. Raises ``InvalidInput`` for an unknown kind of
    file."""
    asked = {"format": _format(data, FORMATS_OF[path]), **options}
    query = {
        name: json.dumps(value) if isinstance(value, (dict, bool)) else value
        for name, value in asked.items()
        if value is not None
    }
    return server.upload(JobItem, f"{path}?{urllib.parse.urlencode(query)}", data, {}, method="POST")


def _format(data: Path, formats: Mapping[str, str]) -> str:
    if data.suffix.lower() not in formats:
        raise InvalidInput(f"{data.name}: expected a file that ends in one of {sorted(formats)}")
    return formats[data.suffix.lower()]


def follow(server: Server, item: JobItem) -> JobItem:
    """Shows a job's progress until it has finished; the job goes on when nothing watches it. Raises ``InvalidInput``
    where it fails."""
    with progress_bars() as bars:
        bar = bars.add_task(item.id, total=None)
        seen = looks(lambda: _job(server, item.id))
        while not item.is_finished:
            item = next(seen)
            if (at := item.progress) is not None:
                bars.update(
                    bar, completed=at.step, total=at.of, description=f"{item.method or item.kind}, {_done(item)}"
                )
    if item.state != "succeeded":
        raise InvalidInput(f"{item.id} {item.state}: {item.problem or 'it was cancelled'}")
    return item


def print_job(item: JobItem, as_json: bool) -> None:
    if as_json:
        print_json(item.model_dump())
        return
    fields: list[tuple[str, object]] = [
        ("job", item.id),
        ("kind", item.kind),
        ("state", item.state),
        ("makes", item.makes),
    ]
    if item.method is not None:
        fields.append(("method", item.method))
    if item.extracted is not None:
        fields.append(("extracted", item.extracted))
    fields += [("backbone", item.backbone), ("created", item.created)]
    if (done := _done(item)) is not None:
        fields.append(("done", done))
    if item.held_out_loss is not None:
        fields.append(("held-out loss", f"{item.held_out_loss:.4f}"))
    if item.chosen is not None:
        fields.append(("chosen", item.chosen))
    scores = item.scores | item.held_against
    print_fields([*fields, *((name, f"{score:.4f}") for name, score in scores.items() if score is not None)])
    for warning in item.warnings:
        print_warning(warning)


def _done(item: JobItem) -> str:
    """What a job did so far, in a few words."""
    if item.version is not None:
        return f"version {item.version}"
    if item.problem is not None:
        return item.problem
    if (at := item.progress) is None:
        return ""
    loss = "" if at.loss is None else f", loss {at.loss:.3f}"
    return f"{at.stage}{': ' * bool(at.stage)}step {at.step}/{at.of}{loss}"


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
