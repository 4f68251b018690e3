"""``jpets task eval``: how well tasks do on labelled texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.app.commands.options import TextPair
from jpets.app.commands.output import JsonOption, busy, print_fields, print_json, shown
from jpets.app.commands.tasks.files import TaskFiles, for_each, task_files
from jpets.errors import InvalidInput, JpetsError, NotFound, one_line

if TYPE_CHECKING:
    from jpets.training.data import Example

DATASET = ("state.json", "dataset_info.json", "dataset_dict.json")
"""What the folders that the datasets library writes have."""


def evaluate(
    files: TaskFiles,
    data: Annotated[
        Path,
        typer.Argument(
            exists=True,
            help=".csv, .tsv, .jsonl, .parquet, or a folder of the datasets library, for all tasks; or a folder with "
            "such texts for each, NAME.csv for NAME.safetensors",
        ),
    ],
    backbone: Annotated[str, typer.Option(envvar="JPETS_BACKBONE", help="folder, installed package or hub id")],
    text: Annotated[str, typer.Option(help="column of the texts, or of lists of words")] = "text",
    text_pair: TextPair = None,
    label: Annotated[
        str | None, typer.Option(help="column of labels  [label; none of pairs that an embedding task is to match]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score tasks on labelled texts: accuracy, F1, Matthews, Pearson, entity F1, as each head has them.

    One that cannot be scored does not stop the others.
    """
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.training.data import Columns, label_column, read_examples
    from jpets.training.session import evaluate_task

    @functools.lru_cache(maxsize=1)
    def examples_of(path: Path, column: str | None) -> Sequence[Example]:
        with busy("read texts"):
            return read_examples(path, Columns(text, text_pair, column))

    with busy("read backbone"):
        loaded = load_backbone(backbone)
    found = task_files(files)
    several = len(found) > 1 or files[0].is_dir()
    results: list[dict[str, Any]] = []

    def score(file: Path) -> None:
        task = read_task(file, id="evaluated", config=loaded.config, backbone=loaded.ref())
        examples = examples_of(texts_of(file, data), label_column(label, task.head.type))
        with busy(f"score {len(examples)} texts"):
            scores = evaluate_task(task, loaded, examples)
        results.append({"file": str(file), "texts": len(examples), "scores": scores})
        if several and not as_json:
            told = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            typer.echo(shown(f"{file}: {told} of {len(examples)} texts"))

    def score_or_note(file: Path) -> None:
        try:
            score(file)
        except (JpetsError, OSError) as error:
            results.append({"file": str(file), "problem": one_line(error)})
            raise

    try:
        for_each(found, score_or_note, tell=lambda nothing: None)
    finally:
        if several and as_json:
            print_json(results)
    if not several:
        ((texts, scores),) = [(each["texts"], each["scores"]) for each in results]
        if as_json:
            print_json({"texts": texts, "scores": scores})
        else:
            print_fields([("texts", texts), *((name, f"{value:.4f}") for name, value in scores.items())])


def texts_of(file: Path, data: Path) -> Path:
    """The texts to score a task file on: ``data``, or the file of that name in that folder.

    Raises ``NotFound``, ``InvalidInput`` where several have it.
    """
    from jpets.training.data import READERS

    if not data.is_dir() or any((data / name).is_file() for name in DATASET):
        return data
    named = [data / f"{file.stem}{suffix}" for suffix in READERS]
    found = [path for path in named if path.is_file()]
    if (data / file.stem).is_dir():
        found.append(data / file.stem)
    if not found:
        raise NotFound(f"expected {file.stem}.csv or another file of texts of that name in {data}, found none")
    if len(found) > 1:
        raise InvalidInput(f"expected one file of texts, found {[path.name for path in found]}; leave one in {data}")
    return found[0]
