"""``jpets backbone pretrain``: a backbone whose lower layers know the texts of a domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jpets.app.commands.options import Seed, TextColumn, TrainingDType, check_new_folder
from jpets.app.commands.output import busy, print_fields, progress_bars


def pretrain(
    source: Annotated[str, typer.Argument(help="folder (Hugging Face or native), installed package or hub id")],
    data: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help=".txt, .csv, .tsv, .jsonl or .parquet")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="folder to write; it must not exist")],
    layers: Annotated[str | None, typer.Option(help="numbers by commas; by default the lower half")] = None,
    text: TextColumn = "text",
    name: Annotated[str | None, typer.Option(help="name of the new backbone; by default DEST's")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="texts a batch")] = 32,
    rate: Annotated[float, typer.Option(min=0, help="learning rate of the layers")] = 1e-4,
    max_length: Annotated[int, typer.Option(min=2, help="tokens that texts are cut to")] = 128,
    dtype: TrainingDType = "bfloat16",
    checkpoints: Annotated[
        Path | None, typer.Option(file_okay=False, help="folder to keep progress in; a killed run goes on from it")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train some layers further on texts without labels, by masked language modelling.

    The result is a backbone of its own, with a fingerprint of its own: tasks are trained on it anew.
    """
    from checkpoints.native import write_native
    from checkpoints.source import load_backbone
    from jpets.app.jobs.further import chosen_layers, first_and_last, further_pretrained
    from jpets.training.data import Columns, read_examples
    from jpets.training.plan import TrainingPlan
    from jpets.training.process import set_up_training

    check_new_folder(destination)
    set_up_training()
    with busy("read texts"):
        examples = read_examples(data, Columns(text, None, None))
    with busy("read backbone"):
        backbone = load_backbone(source)
    plan = TrainingPlan(epochs, batch, rate=rate, dtype=dtype, seed=seed)
    with progress_bars() as bars:
        bar = bars.add_task("pretrain", total=None)
        made, losses = further_pretrained(
            backbone,
            name or destination.name,
            examples,
            chosen_layers(layers, backbone.config.layers),
            max_length,
            plan,
            folder=checkpoints,
            report=lambda step: bars.update(
                bar, completed=step.number, total=step.of, description=f"pretrain, loss {step.loss:.3f}"
            ),
        )
    write_native(made, destination)
    first, last = first_and_last(losses)
    rows = [("first loss", f"{first:.4f}"), ("last loss", f"{last:.4f}")]
    print_fields([("backbone", made.name), ("fingerprint", made.fingerprint), ("updates", len(losses)), *rows])
