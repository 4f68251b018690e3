"""Draws the benchmarks' JSON files: ``python scripts/figures.py docs/results/cpu-2core --out docs/figures``.

Needs matplotlib (``pip install jpets[plot]``). One picture for each benchmark of which there are results.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Document = Mapping[str, Any]
POLICIES = ("fixed", "beta", "turbo", "length-buffer", "alpha", "coordinated", "packed", "auto")
COLOURS = dict(zip(POLICIES, pyplot.get_cmap("tab10").colors, strict=False))
LABELS = {
    "pets": "jpets",
    "seqs": "merged copies",
    "pars": "merged, at once",
    "stacked": "merged, stacked",
    "single": "no batching",
    "naive": "one padded batch",
}


def documents(folder: pathlib.Path, name: str) -> list[Document]:
    every = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [document for document in every if document.get("name") == name]


def policy_rates(document: Document) -> dict[str, float]:
    """Queries a second by policy; of ``fixed`` the best batch size."""
    rates: dict[str, float] = {}
    for system, figures in document["systems"].items():
        policy = "fixed" if system.startswith("fixed") else system
        rates[policy] = max(rates.get(policy, 0.0), figures["qps"])
    return {name: rates[name] for name in POLICIES if name in rates}


def case(document: Document) -> str:
    settings = document["settings"]
    lengths = f"normal(32, {settings['std']:g})" if settings["lengths"] == "gaussian" else settings["lengths"]
    window = f", windows of {settings['window']}" if settings["window"] else ""
    return f"{settings['backbone']}: {settings['methods']}\n{settings['tasks']} tasks, {lengths}{window}"


def draw_batching(found: Sequence[Document]) -> None:
    """PetS figure 12: queries a second by policy, relative to the best fixed batch size where one was measured."""
    found = [document for document in found if "fixed" in policy_rates(document)]
    figure, axis = pyplot.subplots(figsize=(max(6.0, 2.6 * len(found) + 2), 4.2), layout="constrained")
    width = 0.8 / len(POLICIES)
    named: set[str] = set()
    for group, document in enumerate(found):
        rates = policy_rates(document)
        for at, policy in enumerate(POLICIES):
            if policy in rates:
                ratio = rates[policy] / rates["fixed"]
                place = group + (at - (len(POLICIES) - 1) / 2) * width
                axis.bar(place, ratio, width, color=COLOURS[policy], label=None if policy in named else policy)
                named.add(policy)
                axis.text(place, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=6, rotation=90)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(found)), [case(document) for document in found], fontsize=8)
    axis.set_ylabel("throughput / best fixed size")
    axis.margins(y=0.12)
    figure.legend(loc="outside upper center", fontsize=7, ncols=4)


def draw_serving(found: Sequence[Document]) -> None:
    """TurboTransformers figure 12: responses and latency against the rate of requests."""
    _, axes = pyplot.subplots(len(found), 2, figsize=(10, 3.6 * len(found)), squeeze=False, layout="constrained")
    for row, document in zip(axes, found, strict=True):
        for system, figures in document["systems"].items():
            points = figures["curve"]
            rates = [point["rate"] for point in points]
            label = LABELS.get(system, system)
            row[0].plot(rates, [point["responses"] for point in points], marker="o", label=label)
            row[1].plot(rates, [point["p99"] * 1e3 for point in points], marker="o", label=label)
        _ends(row[0], "responses a second")
        _ends(row[1], "p99 latency, ms")
        target = document["settings"]["target"] * 1e3
        row[1].axhline(target, color="grey", linestyle="--", linewidth=0.8)
        row[1].set_yscale("log")
        row[0].set_title(f"MiniLM embeddings over HTTP, {document['settings']['lengths']} lengths", fontsize=9)


def _ends(axis: Axes, label: str) -> None:
    axis.set_xlabel("requests a second (Poisson)")
    axis.set_ylabel(label)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def draw_operators(found: Sequence[Document]) -> None:
    """PetS figure 11: queries a second by order or number of streams."""
    figure, axis = pyplot.subplots(figsize=(max(5.0, 1.6 * len(found) + 3), 3.6), layout="constrained")
    names = list(dict.fromkeys(name for document in found for name in document["systems"]))
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        ratios = [d["systems"][name]["qps"] / d["systems"]["fifo"]["qps"] for d in found]
        axis.bar(np.arange(len(found)) + (at - (len(names) - 1) / 2) * width, ratios, width, label=name)
    axis.set_xticks(
        range(len(found)), [f"{d['settings']['tasks']} tasks\n{d['settings']['length']} tokens" for d in found]
    )
    axis.set_ylabel("throughput / fifo")
    figure.legend(loc="outside upper center", fontsize=8, ncols=len(names))


PETS_TASKS = {"bert-base": 2164, "distilbert": 4344, "bert-large": 560}
"""PetS table 5: the most tasks in 32 GB."""


def draw_capacity(found: Sequence[Document]) -> None:
    """PetS table 5: tasks in a budget, and what each takes of it."""
    _, (counts, each) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    names = [document["settings"]["backbone"] for document in found]
    bars = {
        "merged copies": [d["systems"]["seqs"]["tasks"] for d in found],
        "PetS (its table 5)": [PETS_TASKS.get(name, 0) for name in names],
        "jpets, five methods": [d["systems"]["mixed"]["tasks"] for d in found],
    }
    for at, (name, tasks) in enumerate(bars.items()):
        places = np.arange(len(names)) + (at - 1) * 0.27
        for bar in counts.bar(places, tasks, 0.27, label=name):
            counts.text(
                bar.get_x() + 0.135, bar.get_height(), f"{bar.get_height():,.0f}", ha="center", va="bottom", fontsize=7
            )
    counts.set_yscale("log")
    counts.set_ylabel(f"tasks in {found[0]['settings']['budget_gb']:g} GB")
    counts.set_xticks(range(len(names)), names)
    counts.margins(y=0.15)
    counts.legend(fontsize=7)
    systems = list(found[0]["systems"])
    width = 0.8 / len(systems)
    for at, system in enumerate(systems):
        sizes = [d["systems"][system]["bytes_per_task"] / 1e6 for d in found]
        places = np.arange(len(names)) + (at - (len(systems) - 1) / 2) * width
        for bar in each.bar(places, sizes, width, label="merged copy" if system == "seqs" else system):
            height = bar.get_height()
            each.text(bar.get_x() + width / 2, height, f"{height:.3g}", ha="center", va="bottom", fontsize=6)
    each.set_yscale("log")
    each.set_ylabel("MB a task")
    each.set_xticks(range(len(names)), names)
    each.margins(y=0.35)
    each.legend(fontsize=7, ncols=3)


def draw_memory(found: Sequence[Document]) -> None:
    """TurboTransformers figure 7: working memory of one text after the other."""
    _, axes = pyplot.subplots(1, len(found), figsize=(6.5 * len(found), 3.6), squeeze=False, layout="constrained")
    labels = {"chunks": "chunks that are kept", "arena": "one arena a request", "executables": "XLA, by bucket"}
    for axis, document in zip(axes[0], found, strict=True):
        lengths = document["settings"]["lengths"]
        order = np.argsort(lengths, kind="stable")
        for system, figures in document["systems"].items():
            label = f"{labels[system]} ({figures['new_mb']:.2f} MB new a request)"
            axis.plot(np.array(lengths)[order], np.array(figures["footprints"])[order], marker=".", label=label)
        axis.set_xlabel("tokens of the text")
        axis.set_ylabel("working memory, MB")
        axis.set_title(f"{document['settings']['backbone']}, {len(lengths)} texts in random order", fontsize=9)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)


SYSTEMS = ("pets", "seqs", "pars", "stacked", "backbone")


def draw_throughput(found: Sequence[Document]) -> None:
    """PetS figures 7 and 8: queries a second of jpets and of what people use instead, relative to the bare backbone."""
    figure, axis = pyplot.subplots(figsize=(max(6.0, 2.0 * len(found) + 2), 4), layout="constrained")
    width = 0.8 / len(SYSTEMS)
    named: set[str] = set()
    for group, document in enumerate(found):
        systems = document["systems"]
        for at, name in enumerate(SYSTEMS):
            if name in systems and "backbone" in systems:
                ratio = systems[name]["qps"] / systems["backbone"]["qps"]
                place = group + (at - (len(SYSTEMS) - 1) / 2) * width
                label = None if name in named else LABELS.get(name, name)
                axis.bar(place, ratio, width, color=f"C{at}", label=label)
                axis.text(place, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=7)
                named.add(name)
    axis.set_xticks(range(len(found)), [throughput_case(document["settings"]) for document in found], fontsize=7)
    axis.set_ylabel("throughput / bare backbone")
    axis.margins(y=0.12)
    figure.legend(loc="outside upper center", fontsize=8, ncols=len(SYSTEMS))


def throughput_case(settings: Mapping[str, Any]) -> str:
    lengths = (
        f"normal({settings['length']}, {settings['length_std']:g})" if settings["length_std"] else settings["length"]
    )
    merged = f"\n{settings['merged_tasks']} tasks merged" if settings.get("merged_tasks") else ""
    methods = settings["methods"].replace(",", " ").replace("bitfit ", "bitfit\n")
    return f"{methods}\n{settings['tasks']} x {settings['per_task_batch']} x {lengths}{merged}"


def draw_breakdown(found: Sequence[Document]) -> None:
    """PetS figure 9: where the time of one batch goes."""
    _, axis = pyplot.subplots(figsize=(8, 1.6 + 0.8 * len(found)), layout="constrained")
    names = list(dict.fromkeys(name for document in found for name in document["systems"]["pets"]["shares"]))
    left = np.zeros(len(found))
    for at, name in enumerate(names):
        shares = np.array([max(0.0, d["systems"]["pets"]["shares"].get(name, 0.0)) for d in found])
        axis.barh(range(len(found)), shares, left=left, label=name, color=f"C{at}")
        for row, share in enumerate(shares):
            if share >= 0.04:
                axis.text(
                    left[row] + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=7, color="white"
                )
        left += shares
    labels = [f"{d['settings']['backbone']}\n{d['settings']['tasks']} x {d['settings']['length']}" for d in found]
    axis.set_yticks(range(len(found)), labels, fontsize=8)
    axis.set_xlabel("share of the time of a batch")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=7, ncols=5)


MIGRATION = {
    "none": "no migration",
    "fixed": "Algorithm 3, every 10 s",
    "adaptive": "Algorithm 3, adaptive",
    "ours": "ours, adaptive",
}
MIGRATION_COLOURS = {"none": "grey", "fixed": "C0", "adaptive": "C1", "ours": "C2"}


def draw_migration(found: Sequence[Document]) -> None:
    """Multi-GPU PetS figures 13 and 14: what migration gains, and how much it moves."""
    _, axes = pyplot.subplots(len(found), 2, figsize=(11, 4.2 * len(found)), squeeze=False, layout="constrained")
    for (gained, moved), document in zip(axes, found, strict=True):
        every = document["systems"]
        sizes = sorted({point["devices"] for point in every["none"]["points"]})
        for size, name in itertools.product(sizes, ("fixed", "ours")):
            points = [point for point in every[name]["points"] if point["devices"] == size]
            look = {"color": MIGRATION_COLOURS[name], "linestyle": "-" if size == sizes[-1] else "--"}
            _gains(gained, points, "tasks", label=f"{MIGRATION[name]}, {size} devices", **look)
        for name in ("fixed", "ours"):
            points = [point for point in every[name]["points"] if point["devices"] == sizes[-1]]
            tasks, look = [point["tasks"] for point in points], {"color": MIGRATION_COLOURS[name], "marker": "o"}
            first = [point["first_bytes"] / 1e6 for point in points]
            later = [ten_seconds_later(point, document["settings"]["queries"]) / 1e6 for point in points]
            moved.plot(tasks, first, label=f"{MIGRATION[name]}: first round", **look)
            moved.plot(tasks, later, linestyle=":", label=f"{MIGRATION[name]}: each 10 s from then on", **look)
        moved.set_ylabel(f"MB moved, {sizes[-1]} devices")
        for axis in (gained, moved):
            _powers_of_two(axis, "tasks")


def ten_seconds_later(point: Mapping[str, Any], queries: int) -> float:
    """Bytes that are moved in ten seconds after the first round, which is after ten, on average."""
    return point["later_bytes"] * (point["rounds"] - 1) / (queries / point["qps"] - 10.0) * 10.0


def draw_interval(found: Sequence[Document]) -> None:
    """Multi-GPU PetS figure 15: what migration gains where calls are distributed anew every so often."""
    _, axes = pyplot.subplots(1, len(found), figsize=(5.5 * len(found), 4.2), squeeze=False, layout="constrained")
    for axis, document in zip(axes[0], found, strict=True):
        for name, label in MIGRATION.items():
            if name in document["systems"]:
                points = document["systems"][name]["points"]
                _gains(axis, points, "redraw", label=label, color=MIGRATION_COLOURS[name])
        own = document["settings"]
        axis.set_title(f"{own['devices']} devices, {own['tasks']} tasks, {own['seeds']} draws", fontsize=9)
        _powers_of_two(axis, "seconds after which calls are distributed anew")


def _gains(axis: Axes, points: Sequence[Mapping[str, Any]], along: str, **look: Any) -> None:
    """Mean gain over the seeds, with its range."""
    at, gains = [point[along] for point in points], np.array([point["gains"] for point in points]) * 100
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.plot(at, gains.mean(axis=1), marker="o", **look)
    axis.fill_between(at, gains.min(axis=1), gains.max(axis=1), color=look["color"], alpha=0.08)
    axis.set_ylabel("throughput gained over no migration, %")


def _powers_of_two(axis: Axes, label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(label)
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def draw_tasks(found: Sequence[Document]) -> None:
    """What a task's parameters take and how good they are, beside full fine-tuning and a frozen backbone."""
    _, axes = pyplot.subplots(1, len(found), figsize=(6.5 * len(found), 4.2), squeeze=False, layout="constrained")
    for axis, document in zip(axes[0], found, strict=True):
        by_size = sorted(document["systems"].items(), key=lambda each: float(each[1]["bytes"]))
        for number, (name, own) in enumerate(by_size):
            at, score = own["bytes"] / 1e3, 100 * own["relative"]
            error = 100 * own.get("deviation", 0.0) / np.sqrt(own["runs"])
            axis.errorbar(at, score, yerr=error, marker="o", capsize=2, linewidth=0.8)
            above = 4 if number % 2 else -10  # neighbours may lie close
            axis.annotate(name, (at, score), xytext=(5, above), textcoords="offset points", fontsize=8)
        axis.axhline(100, color="grey", linestyle="--", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("kB a task, head included")
        axis.set_ylabel("score / full fine-tuning, %")
        settings = document["settings"]
        title = f"{settings['train']} texts, {settings['epochs']} epochs, {settings['runs']} runs; bars: standard error"
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)


DRAWN: Mapping[str, Callable[[Sequence[Document]], None]] = {
    "batching": draw_batching,
    "serving": draw_serving,
    "operators": draw_operators,
    "capacity": draw_capacity,
    "memory": draw_memory,
    "throughput": draw_throughput,
    "breakdown": draw_breakdown,
    "migration": draw_migration,
    "interval": draw_interval,
    "debian-tasks": draw_tasks,
}


def main(
    results: Annotated[pathlib.Path, typer.Argument(exists=True, file_okay=False, help="folder of JSON results")],
    out: Annotated[pathlib.Path, typer.Option(file_okay=False, help="folder of the pictures")],
) -> None:
    """Draw every benchmark of which there are results."""
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        if found := documents(results, name):
            draw(found)
            pyplot.savefig(out / f"{name}.png", dpi=130)
            pyplot.close()
            typer.echo(out / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
