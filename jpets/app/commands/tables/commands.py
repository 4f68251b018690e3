"""``jpets plot``: backbones whose lower layers are tables of n-gram vectors, and the domains of these tables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import quote

import typer

from jpets.app.commands.app import App
from jpets.app.commands.client.client import Server
from jpets.app.commands.options import (
    Kept,
    Seed,
    TextColumn,
    TextPair,
    TrainingDType,
    check_new_folder,
    on_command_line,
)
from jpets.app.commands.output import JsonOption, busy, print_fields, print_json, print_table, reporting, size
from jpets.app.commands.tasks.store import ServerOption
from jpets.config import DType
from jpets.errors import InvalidInput

if TYPE_CHECKING:
    from jpets.app.jobs.tables import Made, Making
    from jpets.plot.tree import Branch, Tree
    from jpets.training.data import Example
    from jpets.training.run import UpdateReport
    from jpets.types import Progress

app = App(no_args_is_help=True, help="Backbones whose lower layers are tables of n-gram vectors, by domain (PLOT).")

Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="folder that jpets plot root wrote")]
Data = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=".txt, .csv, .tsv, .jsonl or .parquet")]
Share = Annotated[float, typer.Option(min=0, max=1, help="share of the texts' n-grams that the table holds")]
Epochs = Annotated[int, typer.Option(min=0, help="times that each text is trained on; 0: nothing is trained")]
Batch = Annotated[int, typer.Option(min=1, help="texts a batch")]
Rate = Annotated[float | None, typer.Option(min=0, help="learning rate; by default what suits the layers")]
Guesses = Annotated[float, typer.Option(min=0, help="weight of guessing hidden tokens, beside hidden states")]
Sample = Annotated[
    int | None, typer.Option(min=1, help="texts to train on, drawn at random; n-grams are counted in all. Default: all")
]
MaxLength = Annotated[int, typer.Option(min=2, help="tokens that texts are cut to in training")]


@app.command()
def root(
    source: Annotated[str, typer.Argument(help="folder (Hugging Face or native), installed package or hub id")],
    data: Data,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="folder to write; it must not exist")],
    layers: Annotated[int | None, typer.Option(min=1, help="lower layers to replace; by default half")] = None,
    ngram: Annotated[int, typer.Option(help="tokens of an n-gram: 2, 3 or 5")] = 3,
    share: Share = 0.5,
    name: Annotated[str | None, typer.Option(help="name of the backbone; by default DEST's")] = None,
    text: TextColumn = "text",
    text_pair: TextPair = None,
    epochs: Epochs = 1,
    sample: Sample = None,
    batch: Batch = 32,
    rate: Rate = None,
    guesses: Guesses = 0.0,
    kept_as: Annotated[
        str, typer.Option("--values", help="how vectors are stored: bfloat16 or float8, half as large")
    ] = "bfloat16",
    normal_forms: Annotated[
        bool, typer.Option(help="look tokens up without their case, so that fewer bytes find more n-grams")
    ] = False,
    max_length: MaxLength = 128,
    dtype: TrainingDType = "bfloat16",
    checkpoints: Kept = None,
    seed: Seed = 0,
) -> None:
    """Replace a backbone's lower layers by tables, adapted to it on texts of any domain.

    The result is a backbone of its own: tasks are trained on it anew, and served as on any other. A text then costs
    the upper layers alone.
    """
    if kept_as not in ("bfloat16", "float8"):
        raise typer.BadParameter(f"--values must be bfloat16 or float8, found {kept_as!r}")
    check_new_folder(destination)
    from checkpoints.source import load_backbone
    from jpets.app.jobs.tables import make_root

    with _making(data, (text, text_pair), share, epochs, batch, rate, max_length, dtype, seed, guesses, sample) as (
        examples,
        making,
    ):
        with busy("read backbone"):
            backbone = load_backbone(source)
        count = layers or max(1, backbone.config.layers // 2)
        making = dataclasses.replace(making, kept_as=cast("Any", kept_as), normal_forms=normal_forms)
        again = str(Path(source).resolve()) if Path(source).exists() else source
        called = name or destination.name
        made = make_root(backbone, called, examples, destination, count, ngram, making, checkpoints, again)
    _print_made(made, destination, "root")


@app.command()
def domain(
    backbone: Folder,
    data: Data,
    name: Annotated[str, typer.Argument(help="name of the domain; one of that name is replaced")],
    share: Share = 0.5,
    text: TextColumn = "text",
    text_pair: TextPair = None,
    epochs: Epochs = 1,
    sample: Sample = None,
    batch: Batch = 32,
    rate: Rate = None,
    guesses: Guesses = 0.0,
    whole: Annotated[
        str | None,
        typer.Option(
            help="the backbone that the root was made of, by default from where it was then; its lower layers may "
            "have been trained further"
        ),
    ] = None,
    max_length: MaxLength = 128,
    dtype: TrainingDType = "bfloat16",
    checkpoints: Kept = None,
    seed: Seed = 0,
    replace: Annotated[
        bool, typer.Option("--replace", help="train other layers for a domain that is there: its tasks are refused")
    ] = False,
) -> None:
    """Add a domain to a backbone's tables, from texts of it: its n-gram layers are the root's, trained further.

    Tasks that are trained with --domain NAME look their texts up there. A server takes the table without a stop.
    """
    if epochs and not replace and name in _tree(backbone).domains:
        raise typer.BadParameter(
            f"there is a domain {name!r}, and tasks that learnt from its layers are refused once it has others: "
            "--epochs 0 makes it a new table with the layers that it has, --replace trains others"
        )
    from checkpoints.source import load_backbone
    from jpets.app.jobs.tables import make_domain

    with _making(data, (text, text_pair), share, epochs, batch, rate, max_length, dtype, seed, guesses, sample) as (
        examples,
        making,
    ):
        known = load_backbone(whole) if whole is not None else None
        made = make_domain(backbone, name, examples, making, checkpoints, known)
    _print_made(made, backbone, name)


@app.command("list")
def list_domains(
    context: typer.Context,
    backbone: Annotated[
        Path | None, typer.Argument(exists=True, file_okay=False, help="folder that jpets plot root wrote")
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the root and the domains of a backbone's tables, with their sizes, in its folder or on a server.

    A server lists those of all its backbones, with the tasks that use them and where tokens of texts were found.
    """
    if backbone is not None and not on_command_line(context, "server"):
        server = None
    if (backbone is None) == (server is None):
        raise typer.BadParameter("expected the folder of a backbone, or --server")
    if backbone is None:
        _list_of_server(str(server), as_json=as_json)
        return
    tree = _tree(backbone)
    rows = [
        {"domain": name, "bytes": _bytes(backbone, branch), "layers": branch.layers[:12], **branch.details}
        for name, branch in [("root", tree.root), *sorted(tree.domains.items())]
    ]
    if as_json:
        print_json(rows)
        return
    further = ("share", "texts", "made")
    shown = [
        (row["domain"], f"{row.get('entries', 0):,}", size(row["bytes"]), *(row.get(field, "") for field in further))
        for row in rows
    ]
    numbers = ("entries", "size", "share", "texts")
    print_table(("domain", "entries", "size", *further), shown, numbers=numbers)


@app.command()
def delete(
    backbone: Annotated[str, typer.Argument(help="folder that jpets plot root wrote; with --server a backbone's name")],
    name: Annotated[str, typer.Argument(help="name of the domain")],
    server: ServerOption = None,
) -> None:
    """Remove a domain from a backbone's tables, in its folder or on a server.

    A server, also one that JPETS_SERVER names, refuses while tasks or jobs use it. In a folder nothing is known of
    tasks: those that were trained in it are refused from then on, also by a server that runs.
    """
    if server is not None:
        path = f"/v1/domains/{quote(name, safe='')}?backbone={quote(backbone, safe='')}"
        Server(server).delete(path)
    else:
        from checkpoints.native import PLOT
        from jpets.plot.tree import Tree

        _tree(Path(backbone))
        Tree.change(Path(backbone) / PLOT, lambda tree: tree.without(name))
    typer.echo(f"{name} is removed")


def _list_of_server(server: str, *, as_json: bool) -> None:
    from serving.protocols.schemas import DomainList

    found = Server(server).ask(DomainList, "GET", "/v1/domains").domains
    if as_json:
        print_json([own.model_dump() for own in found])
        return
    rows = [
        (
            own.backbone,
            own.name or "root",
            f"{own.entries:,}",
            size(own.bytes),
            "" if own.tasks is None else own.tasks,
            " ".join(f"{level} {share:.1%}" for level, share in own.found.items()),
            own.problem or "",
        )
        for own in found
    ]
    head = ("backbone", "domain", "entries", "size", "tasks", "tokens found", "problem")
    print_table(head, rows, numbers=("entries", "size", "tasks"))


@contextlib.contextmanager
def _making(
    data: Path,
    columns: tuple[str, str | None],
    share: float,
    epochs: int,
    batch: int,
    rate: float | None,
    max_length: int,
    dtype: DType,
    seed: int,
    guesses: float,
    sample: int | None,
) -> Iterator[tuple[list[Example], Making]]:
    """The texts, and how to make tables of them, with bars that show how far the work is."""
    from jpets.app.jobs.tables import Making
    from jpets.training.data import Columns, read_examples
    from jpets.training.plan import TrainingPlan
    from jpets.training.process import set_up_training

    set_up_training()
    with busy("read texts"):
        examples = read_examples(data, Columns(*columns, None))
    if not examples:
        raise InvalidInput(f"{data.name}: expected texts, found none")
    plan = TrainingPlan(epochs, batch, rate=rate, dtype=dtype, seed=seed)
    with reporting() as report:
        step = _steps(report)
        yield examples, Making(plan, share, max_length, guesses, sample, report=report, step=step)


def _steps(report: Progress) -> Callable[[UpdateReport], None]:
    return lambda step: report("updates", step.number, step.of)


def _tree(backbone: Path) -> Tree:
    from checkpoints.native import PLOT
    from jpets.plot.tree import Tree

    return Tree.read(backbone / PLOT)


def _bytes(backbone: Path, branch: Branch) -> int:
    from checkpoints.native import PLOT
    from jpets.plot.tree import table_path

    path = table_path(backbone / PLOT, branch)
    return path.stat().st_size if path.exists() else 0


def _print_made(made: Made, folder: Path, name: str) -> None:
    rows: list[tuple[str, object]] = [("made", f"{folder.name}: {name}")]
    rows.append(("entries", f"{made.branch.details['entries']:,}"))
    rows.append(("size", size(_bytes(folder, made.branch))))
    if made.losses is not None:
        rows += [("first loss", f"{made.losses[0]:.4f}"), ("last loss", f"{made.losses[1]:.4f}")]
    print_fields(rows)
