"""``jpets task import``: a task file from a PEFT folder, an AdapterHub folder or a fully fine-tuned checkpoint."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.app.commands.options import check_task_output, refuse_options
from jpets.app.commands.output import JsonOption, busy, print_fields, print_json, print_table
from jpets.app.commands.tasks.report import TaskReport
from jpets.errors import InvalidTask
from jpets.kinds import (
    EXTRACTION_OPTIONS,
    ExtractionChoice,
    FloatDType,
    HeadType,
    Pooling,
    Problem,
    TruncationStrategy,
)

if TYPE_CHECKING:
    from jpets.app.jobs.extraction import Candidate

WORST = 8
"""Tensors with the largest losses that are shown."""
OF_TEXTS = ("text_column", "pair_column")
OF_MODELS = ("method", *chain.from_iterable(EXTRACTION_OPTIONS.values()), "texts", *OF_TEXTS)


def import_task(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="folder of a PEFT or AdapterHub adapter or of a fine-tuned model; or a .zip")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="task file to write (.safetensors)")],
    backbone: Annotated[
        str | None, typer.Option(help="folder, package or hub id; by default what the adapter says it was trained on")
    ] = None,
    head: Annotated[HeadType | None, typer.Option(help="where the checkpoint does not say it")] = None,
    problem: Annotated[Problem | None, typer.Option(help="of a sequence classification")] = None,
    labels: Annotated[str | None, typer.Option(help="names, comma-separated, in the order of the outputs")] = None,
    pooling: Annotated[Pooling | None, typer.Option(help="of an embedding head")] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="embeddings to length 1; by default as the folder says"),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="tokens that texts are cut to when served; by default as the folder says")
    ] = None,
    truncation_strategy: Annotated[
        TruncationStrategy | None,
        typer.Option(help="which text of a pair is cut where it is too long  [longest_first]"),
    ] = None,
    method: Annotated[
        ExtractionChoice | None,
        typer.Option(help="what to extract from a fully fine-tuned model; auto: the smallest that agrees"),
    ] = None,
    density: Annotated[float, typer.Option(help="diff: share of the weights that keep their difference")] = 0.005,
    per_matrix: Annotated[bool, typer.Option("--per-matrix", help="diff: the same share of every matrix")] = False,
    block: Annotated[int, typer.Option(min=1, help="diff: whole blocks of so many rows and columns")] = 1,
    rank: Annotated[int, typer.Option(min=1, max=128, help="lora: ranks of each matrix")] = 8,
    energy: Annotated[float | None, typer.Option(help="lora: the ranks that hold this share of the difference")] = None,
    texts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="texts on which the answers are compared")
    ] = None,
    text_column: Annotated[str, typer.Option(help="of --texts")] = "text",
    pair_column: Annotated[str | None, typer.Option(help="of --texts, where the task takes pairs")] = None,
    agreement: Annotated[float, typer.Option(min=0, max=1, help="share of equal answers that auto asks for")] = 0.99,
    dtype: Annotated[FloatDType, typer.Option(help="how floating-point tensors are stored")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Import an adapter, or extract one from a fully fine-tuned model, as a task file.

    Every option that cannot be served is refused by name, all of them at once, and nothing is written.
    """
    from checkpoints.imports.archive import open_folder
    from checkpoints.imports.extract import Extraction
    from checkpoints.imports.heads import Wishes
    from checkpoints.imports.task import base_model, check_model, make_task, read_adapter
    from checkpoints.source import load_backbone
    from checkpoints.task_file import write_task
    from jpets.app.jobs.extraction import extracted_model

    check_task_output(output)
    wishes = Wishes(
        head=head,
        problem=problem,
        labels=tuple(each.strip() for each in labels.split(",")) if labels else (),
        pooling=pooling,
        normalize=normalize,
        max_length=max_length,
        truncation_strategy=truncation_strategy,
    )
    chosen: Candidate | None = None
    with open_folder(source) as folder:
        with busy("read backbone"):
            loaded = load_backbone(backbone or base_model(folder))
        imported = read_adapter(folder, loaded, wishes)
        if imported is not None:
            refuse_options(
                context, OF_MODELS, "only for fully fine-tuned models; this folder holds an adapter, imported as it is"
            )
        else:
            check_model(folder)
            if method is None:
                raise InvalidTask(
                    "the folder holds a fully fine-tuned model: say --method bitfit, diff, lora, onebit or auto"
                )
            _check_options(context, method, texts, energy)
            given = _texts(texts, text_column, pair_column)
            if method == "auto" and not given:
                raise InvalidTask("--method auto compares answers: give --texts")
            how = None
            if method != "auto":
                how = Extraction(method, density, per_matrix, block, rank, energy)
            with busy("extract"):
                imported, chosen = extracted_model(folder, loaded, wishes, how, given, agreement)
        task = make_task("imported", imported, loaded)
    write_task(task, output, dtype)
    report = TaskReport.of_task(output, task, complete=True)
    if as_json:
        print_json({**report.to_dict(), "notes": list(imported.notes), **(chosen.to_dict() if chosen else {})})
        return
    print_fields(report.fields())
    for note in imported.notes:
        print_fields([("note", note)])
    if chosen is not None:
        print_fields(chosen.fields())
        worst = sorted(chosen.losses.items(), key=lambda pair: -pair[1])[:WORST]
        print_table(("tensor", "lost"), [(name, f"{100 * lost:.1f} %") for name, lost in worst], numbers=("lost",))
        if len(worst) < len(chosen.losses):
            print_fields([("note", f"the {len(worst)} of {len(chosen.losses)} tensors that lost most; --json has all")])


def _check_options(context: typer.Context, method: ExtractionChoice, texts: Path | None, energy: float | None) -> None:
    """Raises ``typer.BadParameter`` for options that would do nothing beside the others."""
    for own, names in EXTRACTION_OPTIONS.items():
        if own != method:
            refuse_options(context, names, f"only with --method {own}, found {method}")
    if texts is None:
        refuse_options(context, OF_TEXTS, "only with --texts")
    if energy is not None:
        refuse_options(context, ("rank",), "give --rank or --energy, not both")


def _texts(path: Path | None, text: str, pair: str | None) -> list[Any]:
    from jpets.training.data import Columns, read_examples

    return read_examples(path, Columns(text, pair, None)) if path is not None else []
