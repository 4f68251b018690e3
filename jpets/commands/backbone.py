"""``jpets backbone``: import and show shared models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.commands.output import JsonOption, print_fields, print_json, reporting, size
from jpets.errors import Conflict

if TYPE_CHECKING:
    from checkpoints.backbone import Backbone

app = typer.Typer(no_args_is_help=True, help="Shared models, from a folder, an installed package or the model hub.")

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

    if destination.exists():
        raise Conflict(f"{destination} exists already; remove it or choose another folder")
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
        print_json(named | sizes)
    else:
        print_fields(_summary(backbone).items())


def _summary(backbone: Backbone) -> dict[str, object]:
    config = backbone.config
    return {
        "name": backbone.name,
        "family": config.family,
        "shape": f"{config.layers} layers, hidden size {config.hidden_size}, {config.heads} heads, "
        f"feed-forward {config.intermediate_size}",
        "vocabulary": f"{config.vocab_size} tokens, {config.max_positions} positions",
        "size": f"{_count(backbone):,} parameters, {size(_bytes(backbone))} in float32",
        "fingerprint": backbone.fingerprint,
    }


def _count(backbone: Backbone) -> int:
    return sum(leaf.size for leaf in _leaves(backbone.params))


def _bytes(backbone: Backbone) -> int:
    return sum(leaf.nbytes for leaf in _leaves(backbone.params))


def _leaves(tree: Mapping[Any, Any]) -> Iterator[Any]:
    for branch in tree.values():
        if isinstance(branch, Mapping):
            yield from _leaves(branch)
        else:
            yield branch
