"""Pictures of scheduling: policies, and tasks that move between devices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from results.documents import Document
from results.scheduling_tables import MIGRATION, POLICIES, best_by_policy, spread_cases

COLOURS = dict(zip(POLICIES, pyplot.get_cmap("tab10").colors, strict=False))


def case(document: Document) -> str:
    settings = document.settings
    lengths = f"normal(32, {settings['std']:g})" if settings["lengths"] == "gaussian" else settings["lengths"]
    window = f", windows of {settings['window']}" if settings["window"] else ""
    return f"{settings['backbone']}: {settings['methods']}\n{settings['tasks']} tasks, {lengths}{window}"


def draw_batching(found: Sequence[Document]) -> None:
    """PetS figure 12: queries a second by policy, relative to the best fixed batch size if one was measured."""
    found = [
        document
        for document in found
        if "fixed" in {name: own["qps"] for name, own in best_by_policy(document).items()}
    ]
    figure, axis = pyplot.subplots(figsize=(max(6.0, 2.6 * len(found) + 2), 4.2), layout="constrained")
    width = 0.8 / len(POLICIES)
    named: set[str] = set()
    for group, document in enumerate(found):
        rates = {name: own["qps"] for name, own in best_by_policy(document).items()}
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


def draw_spread(found: Sequence[Document]) -> None:
    """PetS figure 12: policies by deviation of the lengths and number of tasks, relative to the best fixed size."""
    cases = [spread_cases(document) for document in found]
    _, axes = pyplot.subplots(
        len(found),
        1,
        figsize=(max(7, 0.9 * max(map(len, cases))), 3.8 * len(found)),
        squeeze=False,
        layout="constrained",
    )
    for axis, document, own in zip(axes[:, 0], found, cases, strict=True):
        names = [name for name in POLICIES if name in next(iter(own.values()))]
        width = 0.85 / len(names)
        for at, name in enumerate(names):
            ratios = [best[name]["qps"] / best.get("fixed", best[name])["qps"] for best in own.values()]
            places = np.arange(len(own)) + (at - (len(names) - 1) / 2) * width
            axis.bar(places, ratios, width, color=COLOURS[name], label=name)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(own)), [case.replace(", ", "\n") for case in own], fontsize=8)
        axis.set_ylabel("throughput / best fixed size")
        axis.set_title(f"{document.settings['backbone']}, {document.settings['queries']} queries", fontsize=9)
        axis.margins(y=0.2)
        axis.legend(fontsize=7, ncols=len(names))


MIGRATION_COLOURS = {"none": "grey", "fixed": "C0", "adaptive": "C1", "ours": "C2"}


def draw_migration(found: Sequence[Document]) -> None:
    """Multi-GPU PetS figures 13 and 14: what migration gains, and how much it moves."""
    _, axes = pyplot.subplots(len(found), 2, figsize=(11, 4.2 * len(found)), squeeze=False, layout="constrained")
    for (gained, moved), document in zip(axes, found, strict=True):
        every = document.systems
        sizes = sorted({point["devices"] for point in every["none"]["points"]})
        for size, name in itertools.product(sizes, ("fixed", "ours")):
            points = [point for point in every[name]["points"] if point["devices"] == size]
            look = {"color": MIGRATION_COLOURS[name], "linestyle": "-" if size == sizes[-1] else "--"}
            _gains(gained, points, "tasks", label=f"{MIGRATION[name]}, {size} devices", **look)
        for name in ("fixed", "ours"):
            points = [point for point in every[name]["points"] if point["devices"] == sizes[-1]]
            tasks, look = [point["tasks"] for point in points], {"color": MIGRATION_COLOURS[name], "marker": "o"}
            first = [point["first_bytes"] / 1e6 for point in points]
            later = [ten_seconds_later(point, document.settings["queries"]) / 1e6 for point in points]
            moved.plot(tasks, first, label=f"{MIGRATION[name]}: first round", **look)
            moved.plot(tasks, later, linestyle=":", label=f"{MIGRATION[name]}: each 10 s from then on", **look)
        moved.set_ylabel(f"MB moved, {sizes[-1]} devices")
        for axis in (gained, moved):
            _powers_of_two(axis, "tasks")


def ten_seconds_later(point: Mapping[str, Any], queries: int) -> float:
    """Mean bytes moved in any ten seconds after the first round, which comes after ten seconds."""
    return point["later_bytes"] * (point["rounds"] - 1) / (queries / point["qps"] - 10.0) * 10.0


def draw_interval(found: Sequence[Document]) -> None:
    """Multi-GPU PetS figure 15: what migration gains if the distribution of calls changes at intervals."""
    _, axes = pyplot.subplots(1, len(found), figsize=(5.5 * len(found), 4.2), squeeze=False, layout="constrained")
    for axis, document in zip(axes[0], found, strict=True):
        for name, label in MIGRATION.items():
            if name in document.systems:
                points = document.systems[name]["points"]
                _gains(axis, points, "redraw", label=label, color=MIGRATION_COLOURS[name])
        own = document.settings
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
