"""``jpets task eval``: how well a task does on labelled texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jpets.commands.output import JsonOption, busy, print_fields, print_json


def evaluate(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="task file (.safetensors)")],
    data: Annotated[
        Path, typer.Argument(exists=True, help=".csv, .tsv, .jsonl, .parquet, or a folder of the datasets library")
    ],
    backbone: Annotated[str, typer.Option(envvar="JPETS_BACKBONE", help="folder, installed package or hub id")],
    text: Annotated[str, typer.Option(help="column of the texts, or of lists of words")] = "text",
    text_pair: Annotated[str | None, typer.Option(help="column of second texts")] = None,
    label: Annotated[
        str | None, typer.Option(help="column of labels  [label; none of pairs that an embedding task is to match]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a task on labelled texts: accuracy, F1, Matthews, Pearson, entity F1, as its head has them."""
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.training.data import Columns, label_column, read_examples
    from jpets.training.session import evaluate_task

    with busy("read backbone"):
        loaded = load_backbone(backbone)
    task = read_task(file, id="evaluated", config=loaded.config, backbone=loaded.ref())
    examples = read_examples(data, Columns(text, text_pair, label_column(label, task.head.type)))
    with busy(f"score {len(examples)} texts"):
        found = evaluate_task(task, loaded, examples)
    if as_json:
        print_json({"texts": len(examples), "scores": found})
    else:
        print_fields([("texts", len(examples)), *((name, f"{value:.4f}") for name, value in found.items())])
