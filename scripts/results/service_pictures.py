"""Pictures of a server, and of the quality of trained tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from results.documents import Document
from results.service_tables import SYSTEMS


def draw_serving(found: Sequence[Document]) -> None:
    """TurboTransformers figure 12: responses and latency against the rate of requests."""
    _, axes = pyplot.subplots(len(found), 2, figsize=(10, 3.6 * len(found)), squeeze=False, layout="constrained")
    for row, document in zip(axes, found, strict=True):
        for system, figures in document.systems.items():
            points = figures["curve"]
            rates = [point["rate"] for point in points]
            look = {"marker": "o", "label": SYSTEMS[system], "color": f"C{list(SYSTEMS).index(system)}"}
            row[0].plot(rates, [point["responses"] for point in points], **look)
            row[1].plot(rates, [point["p99"] * 1e3 for point in points], **look)
        _ends(row[0], "responses a second")
        _ends(row[1], "p99 latency, ms")
        target = document.settings["target"] * 1e3
        row[1].axhline(target, color="grey", linestyle="--", linewidth=0.8)
        row[1].set_yscale("log")
        what = "MiniLM's tasks of five methods" if document.settings.get("mix") else "MiniLM embeddings"
        row[0].set_title(f"{what} over HTTP, {document.settings['lengths']} lengths", fontsize=9)


def _ends(axis: Axes, label: str) -> None:
    axis.set_xlabel("requests a second (Poisson)")
    axis.set_ylabel(label)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def draw_tasks(found: Sequence[Document]) -> None:
    """Size and quality of a task's parameters, next to full fine-tuning and a frozen backbone."""
    _, axes = pyplot.subplots(1, len(found), figsize=(6.5 * len(found), 4.2), squeeze=False, layout="constrained")
    for axis, document in zip(axes[0], found, strict=True):
        by_size = sorted(document.systems.items(), key=lambda each: float(each[1]["bytes"]))
        for number, (name, own) in enumerate(by_size):
            at, score = own["bytes"] / 1e3, 100 * own["relative"]
            error = 100 * own.get("deviation", 0.0) / np.sqrt(own["runs"])
            axis.errorbar(at, score, yerr=error, marker="o", capsize=2, linewidth=0.8)
            above = 4 if number % 2 else -10  # neighbours may be close
            axis.annotate(name, (at, score), xytext=(5, above), textcoords="offset points", fontsize=8)
        axis.axhline(100, color="grey", linestyle="--", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("kB a task, head included")
        axis.set_ylabel("score / full fine-tuning, %")
        settings = document.settings
        title = f"{settings['train']} texts, {settings['epochs']} epochs, {settings['runs']} runs; bars: standard error"
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)


def draw_growth(found: Sequence[Document]) -> None:
    """HMI figures 11 and 12: throughput and response times by the number of tenants."""
    _, axes = pyplot.subplots(len(found), 2, figsize=(10, 3.6 * len(found)), squeeze=False, layout="constrained")
    for (rates, times), document in zip(axes, found, strict=True):
        for side, label in (("paged", "jpets"), ("swapping", "whole models swapped")):
            points = {
                int(name.partition(" ")[0]): own for name, own in document.systems.items() if name.endswith(f"/{side}")
            }
            rates.plot(list(points), [own["qps"] for own in points.values()], marker="o", label=label)
            times.plot(
                list(points), [own["p50"] * 1e3 for own in points.values()], marker="o", label=f"{label}, median"
            )
        rates.set_ylabel("queries a second")
        times.set_ylabel("response time, ms")
        times.set_yscale("log")
        for axis in (rates, times):
            axis.set_xscale("log")
            axis.set_xlabel("tenants")
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
