"""``jpets backbone``: import and show shared models; list, load and unload those of a running server."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.app.commands.app import App
from jpets.app.commands.backbones.pretrain import pretrain
from jpets.app.commands.client.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.app.commands.client.waiting import looks
from jpets.app.commands.options import check_new_folder
from jpets.app.commands.output import JsonOption, busy, print_fields, print_json, print_table, reporting, size
from jpets.errors import InvalidBackbone
from serving.protocols.schemas import BackboneItem, BackboneList

if TYPE_CHECKING:
    from checkpoints.backbone import Backbone
    from jpets.types import EmbeddingRule

app = App(no_args_is_help=True, help="Shared models, from a folder, an installed package or the model hub.")

app.command()(pretrain)

PATH = "/v1/backbones"
Name = Annotated[str, typer.Argument(help="name of the backbone, as the list shows it")]
Source = Annotated[str, typer.Argument(help="folder (Hugging Face or native), installed package or hub id")]


@app.command("import")
def import_backbone(
    source: Source,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="folder to write; it must not exist")],
    name: Annotated[str | None, typer.Option(help="name of the backbone; by default the source's")] = None,
) -> None:
    """Turn a model into a native backbone, which loads without conversion."""
    from checkpoints.native import write_native
    from checkpoints.source import load_backbone

    check_new_folder(destination)
    with reporting() as report:
        report("import", 0, 2)
        backbone = load_backbone(source, name)
        report("import", 1, 2)
        write_native(backbone, destination)
        report("import", 2, 2)
    print_fields(_summary(backbone).items())


@app.command()
def show(source: Source, as_json: JsonOption = False) -> None:
    """Show a backbone's name, shape, size and fingerprint."""
    from checkpoints.source import load_backbone

    with reporting() as report:
        report("read", 0, 1)
        backbone = load_backbone(source)
        report("read", 1, 1)
    if as_json:
        sizes = {"parameters": _count(backbone), "bytes": _bytes(backbone)}
        named = {"name": backbone.name, "fingerprint": backbone.fingerprint, "config": backbone.config.to_dict()}
        named["embeds"] = dataclasses.asdict(backbone.embeds)
        print_json(named | sizes)
    else:
        print_fields(_summary(backbone).items())


@app.command("list")
def list_backbones(server: ServerUrl = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """List the backbones of a running server, and those that it may load."""
    found = Server(server).ask(BackboneList, "GET", PATH).backbones
    if as_json:
        print_json([item.model_dump() for item in found])
        return
    rows = [
        (item.name, item.state, item.progress or item.problem or "", item.tasks if item.tasks is not None else "")
        for item in found
    ]
    print_table(("backbone", "state", "", "tasks"), rows, numbers=("tasks",))


@app.command()
def load(name: Name, server: ServerUrl = DEFAULT_SERVER) -> None:
    """Have a running server load a backbone beside those it has, and wait until it is ready."""
    here = Server(server)
    item = here.ask(BackboneItem, "PUT", _path(name))
    with busy(f"load {name}"):
        seen = looks(lambda: here.ask(BackboneList, "GET", PATH).backbones)
        while item.state == "starting":
            item = next((each for each in next(seen) if each.name == name), item.model_copy(update={"state": "gone"}))
    if item.state != "ready":
        raise InvalidBackbone(f"{name} is {item.state}: {item.problem or 'it is being unloaded'}")
    typer.echo(f"{name} is ready, with {item.tasks} tasks")


@app.command()
def unload(name: Name, server: ServerUrl = DEFAULT_SERVER) -> None:
    """Have a running server answer what it has for a backbone, and then forget it. Its tasks stay stored."""
    with busy(f"unload {name}"):
        Server(server).delete(_path(name))
    typer.echo(f"{name} is unloaded")


def _path(name: str) -> str:
    return f"{PATH}/{urllib.parse.quote(name, safe='')}"


def _summary(backbone: Backbone) -> dict[str, object]:
    config = backbone.config
    return {
        "name": backbone.name,
        "family": config.family,
        "shape": f"{config.layers} layers, hidden size {config.hidden_size}, {config.heads} heads, "
        f"feed-forward {config.intermediate_size}",
        "vocabulary": f"{config.vocab_size} tokens, {config.max_positions} positions",
        "size": f"{_count(backbone):,} parameters, {size(_bytes(backbone))} in float32",
        "embeds": ", ".join(_embedding(backbone.embeds)),
        "fingerprint": backbone.fingerprint,
    }


def _embedding(rule: EmbeddingRule) -> Iterator[str]:
    """How texts without a task are embedded, in words."""
    yield f"by {rule.pooling}"
    yield "normalised" if rule.normalize else "not normalised"
    if rule.preprocessing.prefix:
        yield f"{rule.preprocessing.prefix!r} before each text"
    if rule.preprocessing.prompts:
        yield f"prompts {', '.join(sorted(rule.preprocessing.prompts))}"
    if rule.preprocessing.max_length:
        yield f"texts cut to {rule.preprocessing.max_length} tokens"


def _count(backbone: Backbone) -> int:
    return sum(leaf.size for leaf in _leaves(backbone.params))


def _bytes(backbone: Backbone) -> int:
    return sum(leaf.nbytes for leaf in _leaves(backbone.params))


def _leaves(tree: Mapping[Any, Any]) -> Iterator[Any]:
    """All but tables, whose entries ``jpets plot list`` tells."""
    for name, branch in tree.items():
        if isinstance(branch, Mapping):
            yield from _leaves(branch)
        elif name != "table":
            yield branch
