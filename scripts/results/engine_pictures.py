"""Pictures of one engine: throughput, shares of time, room, order of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot

from results.documents import Document
from results.engine_tables import COPIES, PETS_TASKS, TORCH, capacities, curve_points


def draw_operators(found: Sequence[Document]) -> None:
    """PetS figure 11: queries a second by order or number of streams."""
    figure, axis = pyplot.subplots(figsize=(max(5.0, 1.6 * len(found) + 3), 3.6), layout="constrained")
    names = list(dict.fromkeys(name for document in found for name in document.systems))
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        ratios = [d.systems[name]["qps"] / d.systems["fifo"]["qps"] for d in found]
        axis.bar(np.arange(len(found)) + (at - (len(names) - 1) / 2) * width, ratios, width, label=name)
    axis.set_xticks(range(len(found)), [f"{d.settings['tasks']} tasks\n{d.settings['length']} tokens" for d in found])
    axis.set_ylabel("throughput / fifo")
    figure.legend(loc="outside upper center", fontsize=8, ncols=len(names))


def draw_capacity(found: Sequence[Document]) -> None:
    """PetS table 5: tasks in a memory budget, and the bytes of each."""
    _, (counts, each) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    own = capacities(found)
    names = [each.backbone for each in own]
    bars = {
        "merged copies": [each.five.systems["seqs"]["tasks"] for each in own],
        "PetS (its table 5)": [PETS_TASKS.get(name, 0) for name in names],
        "jpets, PetS's four methods": [each.four.systems["mixed"]["tasks"] if each.four else 0 for each in own],
        "jpets, five methods": [each.five.systems["mixed"]["tasks"] for each in own],
    }
    for at, (name, tasks) in enumerate(bars.items()):
        places = np.arange(len(names)) + (at - 1.5) * 0.21
        for bar in counts.bar(places, tasks, 0.21, label=name):
            middle, height = bar.get_x() + 0.105, bar.get_height()
            counts.text(middle, height, f"{height:,.0f}", ha="center", va="bottom", fontsize=6)
    counts.set_yscale("log")
    counts.set_ylabel(f"tasks in {found[0].settings['budget_gb']:g} GB")
    counts.set_xticks(range(len(names)), names)
    counts.margins(y=0.3)
    counts.legend(fontsize=7)
    systems = list(own[0].five.systems)
    width = 0.8 / len(systems)
    for at, system in enumerate(systems):
        sizes = [one.five.systems[system]["bytes_per_task"] / 1e6 for one in own]
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
    labels = {"chunks": "chunks that are kept", "arena": "one arena a request", "programs": "XLA, by bucket"}
    for axis, document in zip(axes[0], found, strict=True):
        lengths = document.settings["lengths"]
        order = np.argsort(lengths, kind="stable")
        for system, figures in document.systems.items():
            label = f"{labels[system]} ({figures['new_mb']:.2f} MB new a request)"
            axis.plot(np.array(lengths)[order], np.array(figures["footprints"])[order], marker=".", label=label)
        axis.set_xlabel("tokens of the text")
        axis.set_ylabel("working memory, MB")
        axis.set_title(f"{document.settings['backbone']}, {len(lengths)} texts in random order", fontsize=9)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)


SYSTEMS = {
    "pets": "jpets",
    "seqs": "merged copies",
    "pars": "merged, at once",
    "stacked": "merged, stacked",
    "backbone": "backbone",
}


def draw_throughput(found: Sequence[Document]) -> None:
    """PetS figures 7 and 8: queries a second of jpets and of its alternatives, relative to the bare backbone."""
    figure, axis = pyplot.subplots(figsize=(max(6.0, 2.0 * len(found) + 2), 4), layout="constrained")
    width = 0.8 / len(SYSTEMS)
    named: set[str] = set()
    for group, document in enumerate(found):
        systems = document.systems
        for at, (name, label) in enumerate(SYSTEMS.items()):
            if name in systems and "backbone" in systems:
                ratio = systems[name]["qps"] / systems["backbone"]["qps"]
                place = group + (at - (len(SYSTEMS) - 1) / 2) * width
                axis.bar(place, ratio, width, color=f"C{at}", label=None if name in named else label)
                axis.text(place, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=7)
                named.add(name)
    axis.set_xticks(range(len(found)), [throughput_case(document.settings) for document in found], fontsize=7)
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
    names = list(dict.fromkeys(name for document in found for name in document.systems["pets"]["shares"]))
    left = np.zeros(len(found))
    for at, name in enumerate(names):
        shares = np.array([max(0.0, d.systems["pets"]["shares"].get(name, 0.0)) for d in found])
        axis.barh(range(len(found)), shares, left=left, label=name, color=f"C{at}")
        for row, share in enumerate(shares):
            if share >= 0.04:
                axis.text(
                    left[row] + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=7, color="white"
                )
        left += shares
    labels = [f"{d.settings['backbone']}\n{d.settings['tasks']} x {d.settings['length']}" for d in found]
    axis.set_yticks(range(len(found)), labels, fontsize=8)
    axis.set_xlabel("share of the time of a batch")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=7, ncols=5)


def draw_curve(found: Sequence[Document]) -> None:
    """PetS figures 7 and 8: jpets by the number of tasks, over one task alone and over merged copies."""
    sides = [(each, side) for each in found for side in COPIES if curve_points(each, side)]
    columns = min(3, len(sides))
    size = (4.2 * columns, 3.4 * -(-len(sides) // columns))
    _, axes = pyplot.subplots(-(-len(sides) // columns), columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(sides) :]:
        axis.axis("off")
    for axis, (document, side) in zip(axes.flat, sides, strict=False):
        for shape, points in curve_points(document, side).items():
            ratios = [own["pets_ratio"]["median"] for own in points.values()]
            axis.plot(list(points), ratios, marker="o", label=f"{shape.replace('x', ' x ')} tokens")
        axis.axhline(1, color="grey", linestyle="--", linewidth=0.8)
        axis.set_xscale("log", base=2)
        counts = document.settings["tasks"].split(",")
        axis.set_xticks(list(map(int, counts)), counts)
        axis.set_xlabel("tasks")
        axis.set_title(f"{document.settings['backbone']}: jpets / {COPIES[side].strip('`')}", fontsize=9)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)


def draw_runtimes(found: Sequence[Document]) -> None:
    """TurboTransformers figures 10 and 11: seconds of single texts, and speed of batches beside PyTorch."""
    _, axes = pyplot.subplots(len(found), 2, figsize=(11, 3.8 * len(found)), squeeze=False, layout="constrained")
    for (singles, batches), document in zip(axes, found, strict=True):
        lengths = np.array(document.settings["drawn"])
        order = np.argsort(lengths, kind="stable")
        for name, label in {"pets": "jpets", **TORCH}.items():
            times = np.array(document.systems[name]["singles"])[order] * 1e3
            singles.plot(lengths[order], times, marker=".", label=label)
        singles.set_xlabel("tokens of the text")
        singles.set_ylabel("ms")
        singles.set_title(f"{document.settings['backbone']}, single texts", fontsize=9)
        shapes = list(document.systems["pets"]["batches"])
        for at, (name, label) in enumerate(TORCH.items()):
            ratios = [document.systems[name]["batches"][shape]["pets_ratio"]["median"] for shape in shapes]
            places = np.arange(len(shapes)) + (at - 0.5) * 0.4
            batches.bar(places, ratios, 0.4, label=f"over {label}", color=f"C{at + 1}")
        batches.axhline(1, color="grey", linestyle="--", linewidth=0.8)
        batches.set_xticks(range(len(shapes)), shapes, fontsize=7, rotation=45)
        batches.set_ylabel("speed of jpets / PyTorch")
        for axis in (singles, batches):
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
