"""Thirty tasks of 216 texts each: what ``jpets train *.csv`` makes of them by default, beside a TF-IDF of their words.

    export PYTHONPATH=scripts JAX_COMPILATION_CACHE_DIR=/tmp/jpets-experiments
    python -m experiments.small_tasks docs/results/cpu-2core/small-tasks.jsonl

Each task tells two to five labels apart that a seed draws from one question over Debian packages, on texts that are
drawn too. A line is written for each (task, method), and what is there is not run again; a table is printed in the end.
The training itself holds a tenth of a task's texts out; the TF-IDF of words with logistic regression (scikit-learn)
learns from all of them.
"""

from __future__ import annotations

import itertools
import operator
import pathlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import numpy as np
import typer
from results.markdown import markdown_table
from rich.markdown import Markdown

from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from experiments.debian_tasks import BACKBONE
from experiments.package_tasks import TASKS, Described, PackageTask, known_packages, labelled
from experiments.runs import Budget, Out, Packages, Runs, chosen, console, data_settings, read_lines, within
from jpets.training.data import Example
from jpets.training.many import train_many
from jpets.training.plan import Training
from jpets.training.process import set_up_training
from jpets.training.session import evaluate_task

QUESTIONS = ("topic", "ecosystem", "role", "language", "toolkit", "suite")
METHODS = ("adapter", "lora", "bitfit")
COUNT, TRAIN, TEST = 30, 216, 250
LABELS = (2, 5)
TOGETHER = 6
"""Tasks that are trained in one call, after which their lines are written."""
WORDS = "tf-idf"


def small_task(number: int) -> PackageTask:
    """Some labels of a question, drawn by the task's number."""
    asked = TASKS[QUESTIONS[number % len(QUESTIONS)]]
    rng = np.random.default_rng([7, number])
    labels = rng.choice(asked.labels, int(rng.integers(LABELS[0], LABELS[1] + 1)), replace=False)
    return PackageTask("single-label", asked.field, tuple(sorted(map(str, labels))))


def texts_of(packages: Sequence[Described], number: int) -> tuple[list[Example], list[Example]]:
    """(to train on, to test on); the latter only of labels that the former have."""
    every = labelled(packages, small_task(number))
    sides = []
    for side, count in (("train", TRAIN), ("test", TEST)):
        own = [example for place, example in every if place == side]
        order = np.random.default_rng([3, number, side == "test"]).permutation(len(own))
        sides.append([own[at] for at in order[:count]])
    known = {example.label for example in sides[0]}
    return sides[0], [example for example in sides[1] if example.label in known]


def words_score(train: Sequence[Example], test: Sequence[Example]) -> float:
    """Accuracy of TF-IDF and logistic regression, as scikit-learn has them by default."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000))
    model.fit([each.plain for each in train], [each.label for each in train])
    return float(model.score([each.plain for each in test], [each.label for each in test]))


def lines_of(
    method: str, backbone: Backbone, data: Mapping[int, tuple[list[Example], list[Example]]], max_length: int
) -> list[dict[str, Any]]:
    """A line for each task, trained together by ``method`` with nothing else said."""
    began = time.perf_counter()
    training = Training(cast("Any", method), max_length=max_length)
    found = train_many(backbone, training, {str(number): train for number, (train, _) in data.items()})
    seconds = (time.perf_counter() - began) / len(data)
    lines = []
    for number, (_, test) in data.items():
        result, own = found[str(number)], small_task(number)
        usual = Counter(str(example.label) for example in test).most_common(1)[0][1] / len(test)
        lines.append(
            {
                "task": number,
                "method": method,
                "labels": own.labels,
                "accuracy": evaluate_task(result.task, backbone, test)["accuracy"],
                "majority": usual,
                "held_out": {
                    "found": dict(result.scores),
                    "majority": result.beside.majority,
                    "frozen": result.beside.frozen,
                },
                "epochs": result.plan.epochs,
                "batch": result.plan.batch,
                "updates": len(result.losses),
                "texts": [*result.texts, len(test)],
                "seconds": round(seconds, 1),
            }
        )
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: mean accuracies in per cent, each beside TF-IDF's on the same tasks."""
    scores: dict[str, dict[int, float]] = {}
    for line in lines:
        scores.setdefault(line["method"], {})[line["task"]] = 100 * line["accuracy"]
    words = scores.get(WORDS, {})
    rows = []
    for method, own in scores.items():
        known = sorted(own.keys() & words.keys())
        if method == WORDS or not known:
            continue
        mean, beside = (float(np.mean([each[task] for task in known])) for each in (own, words))
        better = sum(own[task] > words[task] for task in known)
        rows.append([method, str(len(known)), f"{mean:.1f}", f"{beside:.1f}", f"{mean - beside:+.1f}", str(better)])
    return markdown_table(["method", "tasks", "accuracy", "TF-IDF", "difference", "tasks where it is better"], rows)


def main(
    out: Out,
    methods: Annotated[str, typer.Option(help=",".join(METHODS))] = "all",
    budget_minutes: Budget = None,
    max_length: Annotated[int, typer.Option(help="tokens that texts are cut to")] = 128,
    packages: Packages = None,
    backbone: str = BACKBONE,
) -> None:
    """Train what is missing, a few tasks by each method before the next few, and print the means."""
    set_up_training()
    began = time.monotonic()
    names = chosen(methods, METHODS)
    every, loaded = known_packages(packages), load_backbone(backbone)
    common = {
        "backbone": pathlib.Path(backbone).name,
        "max_length": max_length,
        **data_settings(every, fingerprint=loaded),
    }
    runs = Runs(out, common, operator.itemgetter("task", "method"))
    parts = [range(first, min(first + TOGETHER, COUNT)) for first in range(0, COUNT, TOGETHER)]
    for part, method in within(budget_minutes, began, itertools.product(parts, (WORDS, *names))):
        left = runs.missing((number, method) for number in part)
        data = {number: texts_of(every, number) for number, _ in left}
        if not data:
            continue
        if method == WORDS:
            for number, (train, test) in data.items():
                runs.add({"task": number, "method": WORDS, "accuracy": words_score(train, test)})
            continue
        for line in lines_of(method, loaded, data, max_length):
            runs.add(line)
        console.print(f"{method}: tasks {part[0]} to {part[-1]}")
    console.print(Markdown(table(read_lines(out))))


if __name__ == "__main__":
    typer.run(main)
