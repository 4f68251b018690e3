"""``jpets train``: a task file from labelled texts."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jpets.commands.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.commands.jobs import follow, print_job, start_job, texts_to_send
from jpets.commands.options import check_task_output, named
from jpets.commands.output import JsonOption, busy, print_fields, print_json, progress_bars, size
from jpets.commands.store import on_command_line
from jpets.errors import InvalidInput
from serving.job_request import FineTune

if TYPE_CHECKING:
    import jax

    from jpets.training.data import Columns

LISTS = ("sites", "layers")
"""Settings that are lists, of one too."""
METHODS = ("adapter", "lora", "bitfit", "ia3", "prefix", "prompt", "mask", "diff", "onebit", "frozen")


def train(
    data: Annotated[
        Path, typer.Argument(exists=True, help=".csv, .tsv, .jsonl, .parquet, or a folder of the datasets library")
    ],
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", dir_okay=False, help="task file to write (.safetensors)")
    ] = None,
    task: Annotated[str | None, typer.Option(help="task to publish by a job of --server, instead of --output")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            envvar="JPETS_BACKBONE", help="folder, installed package or hub id; with --task one of --server's"
        ),
    ] = None,
    server: ServerUrl = DEFAULT_SERVER,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="with --task, follow the job to its end")] = True,
    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)}  [lora; with --from the method of that task]")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the method, as rank=16 or sites=query,value")
    ] = None,
    text: Annotated[str, typer.Option(help="column of the texts, or of lists of words")] = "text",
    text_pair: Annotated[str | None, typer.Option(help="column of second texts")] = None,
    label: Annotated[
        str | None,
        typer.Option(help="column of labels, numbers, lists of labels, or lists of tags  [label; none to embed pairs]"),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="embedding, of pairs of texts that belong together, or are labelled as alike")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(exists=True, help="held-out texts; by default some of DATA")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0.001, max=0.9, help="share of DATA that is held out")] = 0.1,
    problem: Annotated[str | None, typer.Option(help="regression, where labels are whole numbers")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch: Annotated[int, typer.Option(min=1, help="texts a batch")] = 32,
    accumulate: Annotated[int, typer.Option(min=1, help="batches whose gradients make one update")] = 1,
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; by default what suits the method")] = None,
    head_rate: Annotated[float, typer.Option(min=0, help="learning rate of the head")] = 1e-3,
    warm_up: Annotated[float, typer.Option(min=0, max=1, help="share of the updates in which the rates rise")] = 0.1,
    patience: Annotated[int | None, typer.Option(min=0, help="epochs without a better held-out loss to go on")] = None,
    balanced: Annotated[bool, typer.Option("--balanced", help="let classes count alike, however rare")] = False,
    max_length: Annotated[int, typer.Option(min=2, help="tokens that texts are cut to")] = 128,
    pooling: Annotated[str, typer.Option(help="mean, cls or pooler")] = "mean",
    sweep: Annotated[str | None, typer.Option(help="rate=LOW..HIGH: the best of four rates on held-out texts")] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="task file to go on from; with --task, one of the server's tasks")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(file_okay=False, help="folder to keep progress in; a killed run goes on from it")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="devices that share every batch")] = 1,
    dtype: Annotated[str, typer.Option(help="of the forward pass: bfloat16 or float32")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, max=(1 << 31) - 1)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a task on labelled texts, over the frozen backbone, and write its task file; or have a server do so beside
    serving, and publish it there (--task).

    What did best on held-out texts is kept. The same data, options and machine give the same task.
    """
    from checkpoints.ids import check_id
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task, write_task
    from checkpoints.validation import validate
    from jpets.training.data import Columns, label_column, read_examples
    from jpets.training.plan import Plan, rates_of
    from jpets.training.process import set_up_training
    from jpets.training.session import Training
    from jpets.training.sweep import best_of

    for name, value, known in (
        ("--method", method, (None, *METHODS)),
        ("--pooling", pooling, ("mean", "cls", "pooler")),
        ("--dtype", dtype, ("bfloat16", "float32")),
        ("--problem", problem, (None, "regression")),
        ("--head", head, (None, "embedding")),
    ):
        if value not in known:
            raise typer.BadParameter(f"{name} must be one of {', '.join(filter(None, known))}, found {value!r}")
    if sweep is not None and rate is not None:
        raise typer.BadParameter("give --rate or --sweep, not both")
    if start is not None and on_command_line(context, "pooling"):
        raise typer.BadParameter("--pooling: the task of --from keeps its own")
    if (output is None) == (task is None):
        raise typer.BadParameter("give exactly one of --output FILE and --task ID")
    columns = Columns(text, text_pair, label_column(label, head))
    if task is not None:
        if checkpoints is not None:
            raise typer.BadParameter("--checkpoints: only without --task; a job of a server keeps its own")
        if devices > 1:
            raise typer.BadParameter("--devices: only without --task; a job of a server has one device")
        _train_there(context, data, validation, columns, Server(server), settings_of(setting or []), wait, as_json)
        return
    assert output is not None
    check_task_output(output)
    id = check_id(output.stem.lower())
    if backbone is None:
        raise typer.BadParameter("give --backbone FOLDER, package or hub id")
    set_up_training()
    rates = rates_of(sweep, rate)
    examples = read_examples(data, columns)
    others = read_examples(validation, columns) if validation is not None else []
    with busy("read backbone"):
        loaded = load_backbone(backbone)
    earlier = None
    if start is not None:
        if not Path(start).is_file():
            raise typer.BadParameter(f"--from must be a task file, found {start!r}")
        earlier = read_task(Path(start), config=loaded.config, backbone=loaded.ref())
    plan = Plan(
        epochs, batch, accumulate, rate, head_rate, warm_up, patience=patience, dtype=cast("Any", dtype), seed=seed
    )
    if method is None:
        method = earlier.deltas[0].method if earlier is not None and earlier.deltas else "lora"
    training = Training(
        cast("Any", method),
        settings_of(setting or []),
        plan,
        held_out,
        max_length,
        cast("Any", pooling),
        balanced,
        cast("Any", problem),
        cast("Any", head),
    )
    with progress_bars() as bars:
        shown = {own: bars.add_task(method if own is None else f"{method} at {own:.1e}", total=None) for own in rates}
        best, kept_rate = best_of(
            rates,
            id,
            loaded,
            training,
            examples,
            others,
            start=earlier,
            folder=checkpoints,
            devices=found_devices(devices),
            report=lambda own, step: bars.update(
                shown[own], completed=step.number, total=step.of, description=f"{method}, loss {step.loss:.3f}"
            ),
        )
    validate(best.task, loaded.config, loaded.ref())
    write_task(best.task, output)
    summary = {
        "file": output.name,
        "method": method,
        "rate": kept_rate,
        "held_out_loss": best.held_out,
        "scores": dict(best.scores),
        "updates": len(best.losses) // accumulate,
        "bytes": output.stat().st_size,
    }
    if as_json:
        print_json(summary | {"settings": dataclasses.asdict(training), "losses": list(best.losses)})
        return
    rows = [(name, f"{value:.4f}") for name, value in best.scores.items()]
    print_fields(
        [("file", output.name), ("size", size(output.stat().st_size)), ("held-out loss", f"{best.held_out:.4f}"), *rows]
    )


def _train_there(
    context: typer.Context,
    data: Path,
    validation: Path | None,
    columns: Columns,
    server: Server,
    settings: dict[str, Any],
    wait: bool,
    as_json: bool,
) -> None:
    """By a job of ``server``, which is asked for what the command line says."""
    asked = {name: value for name, value in context.params.items() if name in FineTune.model_fields}
    if not on_command_line(context, "backbone"):  # a variable of the environment names a folder here
        del asked["backbone"]
    with tempfile.TemporaryDirectory(prefix="jpets-") as folder:
        item = start_job(server, asked | {"settings": settings}, texts_to_send(data, validation, columns, Path(folder)))
    print_job(follow(server, item) if wait else item, as_json)


def found_devices(count: int) -> list[jax.Device]:
    """The first ``count`` devices. Raises ``InvalidInput`` where there are fewer."""
    import jax

    found = jax.local_devices()
    if count > len(found):
        raise InvalidInput(f"--devices: expected at most {len(found)}, which this machine has, found {count}")
    return found[:count]


def settings_of(given: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` options: JSON values, lists of names by commas, or texts. Raises ``typer.BadParameter``."""
    found: dict[str, Any] = {}
    for name, value in named(given).items():
        whole, parts = _json_or_text(value), [_json_or_text(part) for part in value.split(",")]
        listed = name in LISTS or (whole == value and len(parts) > 1)
        found[name] = parts if listed and not isinstance(whole, list) else whole
    return found


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
