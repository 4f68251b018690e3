"""Which learning rates suit each method in ``experiments.debian_tasks``, judged without a text of the test side.

    export PYTHONPATH=scripts JAX_COMPILATION_CACHE_DIR=/tmp/jpets-experiments
    python -m experiments.debian_rates docs/results/cpu-2core/debian-rates.jsonl

One task of each kind, trained on texts drawn with a seed that the experiment has not, and scored on five hundred others
of the training side. Goes on where it stopped; a table of means over the tasks is printed in the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from results.markdown import markdown_table
from rich.markdown import Markdown

from checkpoints.source import load_backbone
from experiments.debian_tasks import BACKBONE, Rates, Settings, trained
from experiments.package_tasks import TASKS, draw, known_packages
from experiments.runs import Budget, Out, Packages, Runs, chosen, console, data_settings, read_lines, within
from jpets.training.process import set_up_training

TRIED = ("language", "purpose", "mentions")
SEED = 100
HELD_OUT = 500
SETTINGS = Settings(BACKBONE, train=800, test=1, epochs=4, batch=16, max_length=24)
"""As the experiment's; of the test side nothing is looked at."""


def _several(*own: float, head: Sequence[float] = (5e-3,)) -> tuple[Rates, ...]:
    return tuple(Rates(rate, each) for rate in own for each in head)


CANDIDATES: Mapping[str, Sequence[Rates]] = {
    "full": _several(5e-5, 1e-4, 2e-4),
    "frozen": tuple(Rates(head=rate) for rate in (5e-3, 2e-2, 5e-2)),
    "bitfit": _several(1e-3, 3e-3, 1e-2, head=(5e-3, 2e-2)),
    "adapter": _several(1e-3, 2e-3, 4e-3),
    "lora": _several(2e-3, 4e-3, 8e-3),
    "ia3": _several(1e-2, 3e-2, 1e-1),
    "prefix": _several(3e-3, 1e-2, 3e-2),
    "prompt": _several(1e-2, 3e-2, 1e-1),
    "mask": _several(1e-2, 3e-2, 1e-1),
}
"""``diff`` and ``onebit`` train in stages, each at its own rate."""


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: scores in per cent by method and rates, the best mean of a method in bold."""
    tried: dict[str, dict[Rates, dict[str, float]]] = {}
    for line in lines:
        own = tried.setdefault(line["method"], {}).setdefault(Rates(**line["rates"]), {})
        own[line["task"]] = 100 * line["score"]
    rows = []
    for method, found in tried.items():
        means = {rates: float(np.mean(list(own.values()))) for rates, own in found.items() if len(own) == len(TRIED)}
        for rates, own in found.items():
            mean = f"{means[rates]:.1f}" if rates in means else ""
            best = rates in means and means[rates] == max(means.values())
            scores = [f"{own[task]:.1f}" if task in own else "" for task in TRIED]
            own_rate = "" if rates.own is None else f"{rates.own:g}"
            rows.append([method, own_rate, f"{rates.head:g}", *scores, f"**{mean}**" if best else mean])
    return markdown_table(["method", "rate", "of the head", *TRIED, "mean"], rows)


def main(
    out: Out,
    methods: Annotated[str, typer.Option(help=",".join(CANDIDATES))] = "all",
    tasks: Annotated[str, typer.Option(help=",".join(TRIED))] = "all",
    budget_minutes: Budget = None,
    packages: Packages = None,
    backbone: str = BACKBONE,
) -> None:
    """Train every candidate, task by task, and print their scores."""
    set_up_training()
    began = time.monotonic()
    settings = dataclasses.replace(SETTINGS, backbone=pathlib.Path(backbone).name)
    names = chosen(methods, tuple(CANDIDATES))
    loaded = load_backbone(backbone)
    every = known_packages(packages)
    common = {**dataclasses.asdict(settings), "held_out": HELD_OUT, **data_settings(every, fingerprint=loaded)}
    runs = Runs(out, common, lambda line: (line["task"], line["method"], Rates(**line["rates"])))
    candidates = [(method, rates) for method in names for rates in CANDIDATES[method]]
    pairs = itertools.product(chosen(tasks, TRIED), candidates)
    wanted = runs.missing((task, method, rates) for task, (method, rates) in pairs)
    for task, own in itertools.groupby(within(budget_minutes, began, wanted), key=lambda each: each[0]):
        data = draw(every, TASKS[task], settings.train, settings.test, SEED, share=HELD_OUT / settings.train)
        for _, method, rates in own:
            result = trained(task, method, SEED, loaded, data, settings, rates)
            score = result.scores[TASKS[task].metric]
            runs.add({"task": task, "method": method, "rates": dataclasses.asdict(rates), "score": score})
            console.print(f"{task} {method} {rates}: {score:.3f}")
    console.print(Markdown(table(read_lines(out))))


if __name__ == "__main__":
    typer.run(main)
