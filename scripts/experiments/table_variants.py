"""Tables of 2-, 3- and 5-grams, and of two, three and four lower layers: what tasks keep over each (HMI, tables 8, 10).

    export PYTHONPATH=scripts JAX_COMPILATION_CACHE_DIR=/tmp/jpets-experiments
    python -m experiments.table_variants docs/results/cpu-2core/table-variants.jsonl WORK AREAS/all.txt

Writes a line for each (variant, task, seed) and goes on where an earlier run stopped; roots stay in WORK.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import pathlib
import time
from typing import Annotated, NamedTuple

import typer

from checkpoints.native import PLOT
from checkpoints.source import load_backbone
from experiments.debian_tasks import BACKBONE, Settings, train_one
from experiments.package_tasks import TASKS, draw, known_packages
from experiments.runs import Budget, Out, Packages, Runs, chosen, console, data_settings, within
from jpets.app.jobs.tables import Making, make_root
from jpets.plot.tree import Tree, table_path
from jpets.training.checkpoints import digest_of
from jpets.training.data import Columns, read_examples
from jpets.training.plan import TrainingPlan
from jpets.training.process import set_up_training

METHOD = "lora"


class Variant(NamedTuple):
    """Lower layers that tables stand for, and tokens of their n-grams."""

    layers: int
    ngram: int

    @property
    def name(self) -> str:
        return f"{self.layers}-layers-{self.ngram}-grams"


VARIANTS = {own.name: own for own in (Variant(3, 3), Variant(3, 2), Variant(3, 5), Variant(2, 3), Variant(4, 3))}


class Rooted(NamedTuple):
    """How all roots are made: the texts that are trained on, their tokens, and the share of all n-grams kept."""

    sample: int
    max_length: int
    share: float


def made(variant: Variant, work: pathlib.Path, texts: pathlib.Path, rooted: Rooted) -> pathlib.Path:
    """The folder of a variant's root, named by all that decides it, which is made where it is not there yet."""
    backbone, examples = load_backbone(BACKBONE), read_examples(texts, Columns("text", None, None))
    plan = TrainingPlan(1, 32, dtype="float32")
    making = Making(plan, rooted.share, rooted.max_length, sample=rooted.sample)
    folder = work / f"{variant.name}-{digest_of(rooted, examples, backbone.fingerprint)[:8]}"
    if not folder.exists():
        start = time.perf_counter()
        kept = folder.with_name(f"{folder.name}-kept")
        make_root(backbone, variant.name, examples, folder, variant.layers, variant.ngram, making, kept, BACKBONE)
        console.print(f"{variant.name}: made in {time.perf_counter() - start:.0f} s")
    return folder


def of_tasks(backbone: str) -> Settings:
    return Settings(backbone, train=800, test=1000, epochs=4, batch=16, max_length=24)


def main(
    out: Out,
    work: Annotated[pathlib.Path, typer.Argument(file_okay=False, help="folder of the roots")],
    texts: Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False, help="of area_texts")],
    variants: Annotated[str, typer.Option(help=",".join(VARIANTS))] = "all",
    tasks: Annotated[str, typer.Option(help=",".join(TASKS))] = "ecosystem,purpose,administration,language",
    seeds: str = "0",
    sample: Annotated[int, typer.Option(min=1, help="texts that layers learn from; n-grams are counted in all")] = 4000,
    max_length: Annotated[int, typer.Option(min=8, help="tokens that these texts are cut to")] = 32,
    share: Annotated[float, typer.Option(min=0, max=1, help="of all n-grams' occurrences that tables hold")] = 0.3,
    budget_minutes: Budget = None,
    packages: Packages = None,
) -> None:
    """Make the roots; train and test tasks over each."""
    set_up_training()
    began, rooted = time.monotonic(), Rooted(sample, max_length, share)
    wanted = itertools.product(
        chosen(variants, tuple(VARIANTS)), chosen(tasks, tuple(TASKS)), map(int, seeds.split(","))
    )
    every = known_packages(packages)
    common = {
        "root": rooted._asdict(),
        "texts": digest_of(read_examples(texts, Columns("text", None, None)))[:16],
        **{key: own for key, own in dataclasses.asdict(of_tasks("")).items() if key != "backbone"},
        **data_settings(every, fingerprint=load_backbone(BACKBONE)),
    }
    runs = Runs(out, common, operator.itemgetter("variant", "task", "seed"))
    left = runs.missing(wanted)
    for name, own in itertools.groupby(within(budget_minutes, began, left), key=lambda each: each[0]):
        folder = made(VARIANTS[name], work, texts, rooted)
        backbone, tree = load_backbone(folder), Tree.read(folder / PLOT)
        settings = of_tasks(name)
        for _, task, seed in own:
            data = draw(every, TASKS[task], settings.train, settings.test, seed)
            line = train_one(task, METHOD, seed, backbone, data, settings)
            table = {
                "entries": tree.root.details["entries"],
                "bytes": table_path(folder / PLOT, tree.root).stat().st_size,
            }
            runs.add({"variant": name, **VARIANTS[name]._asdict(), "table": table, **line})
            console.print(f"{name} {task} {seed}: {line['score']:.3f} in {line['seconds']:.0f} s")


if __name__ == "__main__":
    typer.run(main)
