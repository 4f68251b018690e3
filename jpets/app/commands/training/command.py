"""``jpets train``: a task file from labelled texts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand, TyperOption

from jpets.app.commands.client.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.app.commands.client.jobs import follow, print_job, start_job, texts_to_send
from jpets.app.commands.options import TextPair, TrainingDType, named, on_command_line, refuse_options
from jpets.app.commands.output import JsonOption
from jpets.app.commands.training.here import train_each, train_one
from jpets.kinds import Pooling, TruncationStrategy
from serving.jobs.request import DEFAULT_METHOD, FineTune, job_methods

if TYPE_CHECKING:
    from jpets.training.data import Columns

LISTS = ("sites", "layers")
"""Settings that are lists, also where one value is given."""


class TrainCommand(TyperCommand):
    """Its help lists the methods, which take long to import."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.name == "method":
                option.help = f"{', '.join(job_methods())}  {option.help}"
        super().format_help(ctx, formatter)


def train(
    data: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help=".csv, .tsv, .jsonl, .parquet, or a folder of the datasets library; of several, each makes a task",
        ),
    ],
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="task file to write (.safetensors), or a folder for that of each DATA"),
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
    method: Annotated[str | None, typer.Option(help="[lora; with --from the method of that task]")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the method, as rank=16 or sites=query,value")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="layers of the deltas, as 3,4,5 or upper: tasks of the upper half share the rest on one text"
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="column of the texts, or of lists of words")] = "text",
    text_pair: TextPair = None,
    label: Annotated[
        str | None,
        typer.Option(help="column of labels, numbers, lists of labels, or lists of tags  [label; none to embed pairs]"),
    ] = None,
    head: Annotated[
        Literal["embedding"] | None,
        typer.Option(help="of pairs of texts that belong together, or are labelled as alike"),
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(exists=True, help="held-out texts; by default some of DATA")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0.001, max=0.9, help="share of DATA that is held out")] = 0.1,
    problem: Annotated[
        Literal["regression"] | None, typer.Option(help="regression, where labels are whole numbers")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="by default as many as the number of texts needs")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="texts a batch  [16, of many texts 32]")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="batches whose gradients make one update")] = 1,
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; by default what suits the method")] = None,
    head_rate: Annotated[float, typer.Option(min=0, help="learning rate of the head")] = 5e-3,
    warm_up: Annotated[float, typer.Option(min=0, max=1, help="share of the updates in which the rates rise")] = 0.1,
    patience: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="epochs without a better held-out loss to go on  [half of the epochs where those are not given]",
        ),
    ] = None,
    balanced: Annotated[bool, typer.Option("--balanced", help="let classes count alike, however rare")] = False,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="tokens that texts are cut to: 128, or the length of the task of --from")
    ] = None,
    truncation_strategy: Annotated[
        TruncationStrategy | None,
        typer.Option(help="which text of a pair is cut where it is too long; as in the task of --from"),
    ] = None,
    pooling: Annotated[Pooling | None, typer.Option(help="how vectors of tokens become one  [mean]")] = None,
    sweep: Annotated[str | None, typer.Option(help="rate=LOW..HIGH: the best of four rates on held-out texts")] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="task file to go on from; with --task, one of the server's tasks")
    ] = None,
    domain: Annotated[str | None, typer.Option(help="domain of a backbone with tables (see jpets plot)")] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(file_okay=False, help="folder to keep progress in; a killed run goes on from it")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="devices that share every batch")] = 1,
    dtype: TrainingDType = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, max=(1 << 31) - 1)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a task on labelled texts, over the frozen backbone, and write its task file; or have a server do so beside
    serving, and publish it there (--task). Of several files of texts each makes a task of its own, in one program.

    What did best on held-out texts is kept. The same data, options and machine give the same task.
    """
    from jpets.training.data import Columns, label_column
    from jpets.training.plan import Training, TrainingPlan
    from jpets.training.process import set_up_training

    if method not in (None, *job_methods()):
        raise typer.BadParameter(f"--method must be one of {', '.join(job_methods())}, found {method!r}")
    if sweep is not None and rate is not None:
        raise typer.BadParameter("give --rate or --sweep, not both")
    if start is not None and pooling is not None:
        raise typer.BadParameter("--pooling: the task of --from keeps its own")
    if validation is not None:
        refuse_options(context, ("held_out",), "only without --validation, which gives all that are held out")
    if (output is None) == (task is None):
        raise typer.BadParameter("give exactly one of --output FILE and --task ID")
    columns = Columns(text, text_pair, label_column(label, head))
    settings = settings_of([*(setting or []), *([f"layers={layers}"] if layers is not None else [])])
    if task is not None:
        if len(data) > 1:
            raise typer.BadParameter(f"--task: a job makes one task of one file of texts, found {len(data)}")
        refuse_options(context, ("checkpoints",), "only without --task; a job of a server keeps its own")
        refuse_options(context, ("devices",), "only without --task; a job of a server has one device")
        _train_there(context, data[0], validation, columns, Server(server), settings, wait, as_json)
        return
    assert output is not None
    refuse_options(context, ("server", "wait"), "only with --task; a task for --output is trained here")
    if backbone is None:
        raise typer.BadParameter("give --backbone FOLDER, package or hub id")
    set_up_training()
    plan = TrainingPlan(epochs, batch, accumulate, rate, head_rate, warm_up, patience=patience, dtype=dtype, seed=seed)
    training = Training(
        cast("Any", method or DEFAULT_METHOD),
        settings,
        plan,
        held_out,
        max_length,
        pooling or Training.pooling,
        balanced,
        problem,
        head,
        domain,
        truncation_strategy,
    )
    if len(data) > 1 or output.is_dir() or not output.suffix:
        alone = ("validation", "sweep", "start", "checkpoints", "devices")
        refuse_options(context, alone, "only for one file of texts and --output FILE")
        train_each(data, output, backbone, columns, training, as_json=as_json)
        return
    train_one(
        data[0],
        validation,
        output,
        backbone,
        columns,
        training,
        goes_by_start=method is None,
        sweep=sweep,
        start=start,
        checkpoints=checkpoints,
        devices=devices,
        as_json=as_json,
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
