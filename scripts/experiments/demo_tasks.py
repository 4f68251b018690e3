"""Train the demo tasks: five questions about Debian packages, each answered by another PET method over one MiniLM.

    PYTHONPATH=scripts python -m experiments.demo_tasks

Beside each task stand two baselines with the same texts and epochs: the head alone on the frozen backbone, and full
fine-tuning. Accuracies are those of the written file, read back and run in f32. Needs the packages that
``debian_packages`` names, with the lists of long descriptions, and writes ``checkpoints/demo``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markdown import Markdown

import checkpoints
from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, write_task
from experiments.debian_packages import QUESTIONS
from experiments.debian_tasks import BACKBONE, RATES, Rates, served_by
from experiments.package_tasks import TASKS, Data, draw, known_packages
from experiments.runs import chosen
from jpets.training.plan import Training, TrainingPlan
from jpets.training.process import set_up_training
from jpets.training.session import Result, run_training, task_logits
from jpets.types import Task

DEMO = Path(checkpoints.__file__).parent / "demo"


@dataclasses.dataclass(frozen=True)
class Demo:
    """How one task is trained. More texts, and more epochs, where the gain was smallest."""

    method: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    texts: int = 2000
    epochs: int = 3


DEMOS: Mapping[str, Demo] = {
    "topic": Demo("adapter", {"placement": "houlsby", "bottleneck": 32}),
    "role": Demo("lora", {"sites": ["query", "value"], "rank": 8}),
    "toolkit": Demo("bitfit", texts=4000, epochs=5),
    "ecosystem": Demo("mask"),
    "language": Demo("diff", epochs=4),
}


def trained(name: str, demo: Demo, method: str, backbone: Backbone, data: Data, max_length: int) -> Result:
    rates = RATES.get(method, Rates())
    plan = TrainingPlan(demo.epochs, 32, rate=rates.own, head_rate=rates.head)
    settings = demo.settings if method == demo.method else {}
    training = Training(method, settings, plan, max_length=max_length)
    return run_training(name, backbone, training, data.train, data.chosen_by)


def measured(task: Task, backbone: Backbone, data: Data) -> dict[str, Any]:
    """Accuracy, and recall: of each label the share of its texts that get it (tests hold these against other label
    mixes)."""
    best = [task.labels[int(own.argmax())] for own in task_logits(task, backbone, data.test)]
    right: dict[str, list[bool]] = {label: [] for label in task.labels}
    for found, example in zip(best, data.test, strict=True):
        right[str(example.label)].append(found == example.label)
    shares = {label: round(float(np.mean(own)), 4) for label, own in right.items() if own}
    return {"accuracy": round(float(np.mean([each for own in right.values() for each in own])), 4), "recall": shares}


def train_demo(name: str, backbone: Backbone, data: Data, max_length: int, path: Path) -> dict[str, Any]:
    """Trains, writes and measures one task, and its baselines."""
    demo = DEMOS[name]
    result = trained(name, demo, demo.method, backbone, data, max_length)
    about = f"{QUESTIONS[name].description}. Trained on descriptions of Debian packages."
    task = dataclasses.replace(result.task, description=about, license="Apache-2.0", created=time.strftime("%Y-%m-%d"))
    write_task(task, path, "float16")
    served = read_task(path, config=backbone.config, backbone=backbone.ref())
    counts = np.unique([str(example.label) for example in data.test], return_counts=True)[1]
    baselines: tuple[str, ...] = ("frozen", "full")
    found: dict[str, float] = {}
    for each in baselines:
        base = trained(name, demo, each, backbone, data, max_length)
        found[each] = measured(base.task, served_by(each, base, backbone), data)["accuracy"]
    return {
        "question": name,
        "method": demo.method,
        "train": len(data.train),
        "test": len(data.test),
        "epochs": demo.epochs,
        "majority": round(float(counts.max() / counts.sum()), 4),
        **found,
        **measured(served, backbone, data),
    }


def write_results(folder: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Adds ``found`` to the folder's ``results.json``, in the order of the questions, and returns the whole."""
    path = folder / "results.json"
    results = (json.loads(path.read_text()) if path.exists() else {}) | dict(found)
    ordered = {name: results[name] for name in DEMOS if name in results}
    path.write_text(json.dumps(ordered, indent=2) + "\n")
    return ordered


def table(results: Mapping[str, Any], folder: Path) -> str:
    """The results as a Markdown table; accuracies in per cent."""
    columns = ("majority", "frozen", "accuracy", "full")
    lines = [f"| task | method | kB | train | test | {' | '.join(columns)} |", f"|---|---|{'---:|' * 7}"]
    for name, row in results.items():
        size = (folder / f"{name}.safetensors").stat().st_size / 1e3
        shares = " | ".join(f"{100 * row[column]:.1f}" for column in columns)
        lines.append(f"| {name} | {row['method']} | {size:.0f} | {row['train']} | {row['test']} | {shares} |")
    return "\n".join(lines)


def main(
    tasks: Annotated[str, typer.Option(help=",".join(DEMOS))] = "all",
    test: Annotated[int, typer.Option(min=1, help="most texts to test on")] = 1000,
    max_length: Annotated[int, typer.Option(help="tokens that texts are cut to, in training and when served")] = 40,
    packages: Annotated[Path | None, typer.Option(exists=True, help="of debian_packages.py")] = None,
    out: Path = DEMO,
) -> None:
    """Write OUT/<task>.safetensors and OUT/results.json, and print the results."""
    set_up_training()
    names = chosen(tasks, tuple(DEMOS))
    console = Console()
    backbone = load_backbone(BACKBONE)
    every = known_packages(packages)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        began = time.monotonic()
        data = draw(every, TASKS[name], DEMOS[name].texts, test, seed=0)
        results = write_results(out, {name: train_demo(name, backbone, data, max_length, out / f"{name}.safetensors")})
        console.print(f"{name}: {time.monotonic() - began:.0f} s")
    console.print(Markdown(table(results, out)))


if __name__ == "__main__":
    typer.run(main)
