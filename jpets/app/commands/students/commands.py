"""``jpets students``: groups of shallow students in place of one deep model (Student Parallelism)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.app.commands.app import App
from jpets.app.commands.client.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.app.commands.options import (
    Kept,
    Seed,
    TextColumn,
    TextPair,
    TrainingDType,
    check_new_folder,
    check_task_output,
    parsed,
    refuse_options,
)
from jpets.app.commands.output import (
    JsonOption,
    busy,
    print_fields,
    print_json,
    print_table,
    progress_bars,
    size,
)
from jpets.app.commands.training.command import settings_of
from serving.jobs.request import GroupOptions

if TYPE_CHECKING:
    from jpets.students.session import GroupResult

app = App(no_args_is_help=True, help="Groups of shallow students that answer in place of one deep model.")

Data = Annotated[Path, typer.Argument(exists=True, help=".csv, .tsv, .jsonl or .parquet, with a column of labels")]
Shallow = Annotated[
    str, typer.Option("--backbone", envvar="JPETS_BACKBONE", help="shallow backbone, of jpets students backbone")
]
Label = Annotated[str, typer.Option(help="column of labels")]
MaxLength = Annotated[int, typer.Option(min=2, help="tokens that texts are cut to")]


@app.command()
def backbone(
    source: Annotated[str, typer.Argument(help="folder (Hugging Face or native), installed package or hub id")],
    data: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="texts without labels, one kind or many")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="folder to write; it must not exist")],
    layers: Annotated[int, typer.Option(min=1, help="layers to keep")] = 2,
    text: TextColumn = "text",
    name: Annotated[str | None, typer.Option(help="name of the new backbone; by default DEST's")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="texts a batch")] = 32,
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; by default what suits it")] = None,
    max_length: MaxLength = 64,
    dtype: TrainingDType = "bfloat16",
    checkpoints: Kept = None,
    seed: Seed = 0,
) -> None:
    """Make the shallow backbone that students begin with: some of a backbone's layers, which learn what all of them say
    of texts. It is a backbone of its own; all groups of one depth can share it.
    """
    from checkpoints.native import write_native
    from checkpoints.source import load_backbone
    from jpets.app.jobs.further import first_and_last
    from jpets.app.jobs.students import shallow_backbone
    from jpets.training.data import Columns, read_examples
    from jpets.training.plan import TrainingPlan
    from jpets.training.process import set_up_training

    check_new_folder(destination)
    set_up_training()
    with busy("read texts"):
        examples = read_examples(data, Columns(text, None, None))
    with busy("read backbone"):
        whole = load_backbone(source)
    plan = TrainingPlan(epochs, batch, rate=rate, dtype=dtype, seed=seed)
    with progress_bars() as bars:
        bar = bars.add_task("distil", total=None)
        made, losses = shallow_backbone(
            whole,
            name or destination.name,
            examples,
            layers,
            max_length,
            plan,
            folder=checkpoints,
            report=lambda step: bars.update(
                bar, completed=step.number, total=step.of, description=f"distil, loss {step.loss:.3f}"
            ),
        )
    write_native(made, destination)
    first, last = first_and_last(losses)
    print_fields(
        [
            ("backbone", made.name),
            ("fingerprint", made.fingerprint),
            ("layers", f"{layers} of {whole.config.layers}"),
            ("updates", len(losses)),
            ("first loss", f"{first:.4f}"),
            ("last loss", f"{last:.4f}"),
        ]
    )


@app.command()
def train(
    data: Data,
    context: typer.Context,
    output: Annotated[Path, typer.Option("-o", "--output", help="task file to write (.safetensors)")],
    teacher: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="task file of the deep model")],
    teacher_backbone: Annotated[str, typer.Option(help="the teacher's backbone: folder, package or hub id")],
    backbone: Annotated[
        list[str],
        typer.Option(
            help="shallow backbone, of jpets students backbone; of several, the one of fewest layers whose "
            "first student reaches 95 % of the teacher's score"
        ),
    ],
    validation: Annotated[
        Path | None, typer.Option(exists=True, help="held-out texts; by default some of DATA")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0.01, max=0.9, help="share of DATA that is held out")] = 0.1,
    texts: Annotated[Path | None, typer.Option(exists=True, help="more texts to learn from, without labels")] = None,
    text: TextColumn = "text",
    text_pair: TextPair = None,
    label: Label = "label",
    most: Annotated[int, typer.Option(min=1, max=8, help="most students")] = 4,
    method: Annotated[str, typer.Option(help="what makes a student of the backbone: lora, adapter, ...")] = "lora",
    setting: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the method, as rank=64")] = None,
    stacking: Annotated[
        float | None, typer.Option(min=0, help="weight of imitating the students before (lambda); 0 for none  [1]")
    ] = None,
    boosting: Annotated[
        bool, typer.Option(help="each student corrects those before; or learns the teacher alone (bagging)")
    ] = True,
    pruning: Annotated[
        bool, typer.Option(help="any number of the first students learns to answer; or only all together")
    ] = True,
    copies: Annotated[int, typer.Option(min=0, help="varied copies of each text to learn from")] = 1,
    epochs: Annotated[int | None, typer.Option(min=1, help="of each stage")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="texts a batch")] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; by default what suits the method")] = None,
    max_length: MaxLength = 128,
    dtype: TrainingDType = "bfloat16",
    checkpoints: Kept = None,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a group of students from a teacher, and write its task file, which is uploaded and asked as any other.

    Each further student corrects the sum of those before; then one head learns to answer by any number of the first
    ones. The file has as many students as did best on held-out texts.
    """
    from checkpoints.ids import check_id
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.app.jobs.students import GroupTexts, make_group
    from jpets.deltas.recipe import FROZEN
    from jpets.students.depth import check_depths
    from jpets.students.teacher import Teacher
    from jpets.training.data import Columns, read_examples
    from jpets.training.methods import together_names
    from jpets.training.process import set_up_training

    check_task_output(output)
    if validation is not None:
        refuse_options(context, ("held_out",), "only without --validation, which gives all that are held out")
    if method not in (known := [name for name in together_names() if name != FROZEN]):
        raise typer.BadParameter(f"--method must be one of {', '.join(known)}, found {method!r}")
    given = {name: value for name, value in context.params.items() if name in GroupOptions.model_fields}
    options = parsed(GroupOptions, given | {"settings": settings_of(setting or [])})
    id = check_id(output.stem.lower())
    set_up_training()
    labelled, plain = Columns(text, text_pair, label), Columns(text, text_pair, None)
    with busy("read texts"):
        read = GroupTexts(
            read_examples(data, labelled),
            read_examples(validation, labelled) if validation is not None else (),
            read_examples(texts, plain) if texts is not None else (),
        )
    with busy("read backbones"):
        deep = load_backbone(teacher_backbone)
        shallow = [load_backbone(each) for each in backbone]
        own = Teacher(read_task(teacher, config=deep.config, backbone=deep.ref()), deep)
    check_depths([each.config for each in shallow], stacked=bool(options.stacking))
    with progress_bars() as bars:
        shown: dict[str, Any] = {}

        def report(what: str, step: Any) -> None:
            if what not in shown:
                shown[what] = bars.add_task(what, total=None)
            bars.update(shown[what], completed=step.number, total=step.of, description=f"{what}, loss {step.loss:.3f}")

        made = make_group(id, shallow, own, read, options, output, folder=checkpoints, report=report)
    _print_scores(made, output, as_json=as_json)


@app.command("eval")
def evaluate(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="task file of a group")],
    data: Data,
    backbone: Shallow,
    text: TextColumn = "text",
    text_pair: TextPair = None,
    label: Label = "label",
    as_json: JsonOption = False,
) -> None:
    """Score the first 1, 2, ... students of a group on labelled texts."""
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.students.session import group_scores
    from jpets.training.data import Columns, read_examples

    with busy("read backbone"):
        loaded = load_backbone(backbone)
    task = read_task(file, id="evaluated", config=loaded.config, backbone=loaded.ref())
    with busy("read texts"):
        examples = read_examples(data, Columns(text, text_pair, label))
    with busy(f"score {len(examples)} texts"):
        found = group_scores(task, loaded, examples)
    if as_json:
        print_json({"texts": len(examples), "scores": found})
        return
    _print_sizes(found)


@app.command("serve-policy")
def serve_policy(server: ServerUrl = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show how many students a server's groups answer with now, by which rule, and how often it changed."""
    from serving.protocols.schemas import StudentsList

    found = Server(server).ask(StudentsList, "GET", "/v1/students").students
    if as_json:
        print_json([own.model_dump() for own in found])
        return
    if not found:
        typer.echo("the server has no groups of students")
    for own in found:
        print_fields(
            [
                ("backbone", own.backbone),
                ("groups", own.groups),
                ("answering", f"{own.answering} of {own.largest} students"),
                (
                    "fewer",
                    "never" if own.fixed else f"as more wait than {own.side_by_side} groups of {own.together} texts",
                ),
                ("one more", f"after {own.window:g} quiet seconds"),
                ("dropped", f"{own.drops} times"),
                ("added again", f"{own.additions} times"),
                *((f"answers by {number}", count) for number, count in sorted(own.answers.items())),
                *(
                    (f"{number} keep", f"{share:.1%} of the teacher's score")
                    for number, share in sorted(own.kept.items())
                ),
            ]
        )


def _print_scores(made: GroupResult, output: Path, *, as_json: bool) -> None:
    told = {
        "file": output.name,
        "bytes": output.stat().st_size,
        "backbone": made.task.backbone.name,
        "students": made.best,
        "scores": [dict(each) for each in made.scores],
        "teacher": dict(made.teacher),
        "left": list(made.ensemble.left),
        "multipliers": list(made.pruned.multipliers),
    }
    if as_json:
        print_json(told)
        return
    print_fields(
        [
            ("file", f"{output.name}, {size(output.stat().st_size)}"),
            ("backbone", made.task.backbone.name),
            ("students", f"{made.best} of {len(made.scores)} trained"),
            (f"teacher's {made.metric}", f"{made.teacher[made.metric]:.4f}"),
        ]
    )
    _print_sizes(made.scores, made.teacher)


def _print_sizes(found: Sequence[Mapping[str, float]], teacher: Mapping[str, float] | None = None) -> None:
    names = list(found[0])
    rows = [(str(at), *(f"{each[name]:.4f}" for name in names)) for at, each in enumerate(found, 1)]
    if teacher is not None:
        rows.append(("teacher", *(f"{teacher[name]:.4f}" for name in names)))
    print_table(("students", *names), rows, numbers=tuple(names))
