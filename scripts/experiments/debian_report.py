"""The tables of ``experiments.debian_tasks``, and the document that ``figures.py`` draws."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from benches import shared
from results.markdown import markdown_table

from experiments.package_tasks import TASKS
from jpets.deltas import trainable

Line = Mapping[str, Any]
MARKS = ("<!-- tables: written by experiments.debian_tasks report -->", "<!-- end of tables -->")
ORDER = ("full", *trainable(), "frozen")
KINDS = ("single-label", "multi-label", "tags")


def relative(lines: Sequence[Line]) -> dict[str, list[tuple[str, float]]]:
    """By method (task, score over full fine-tuning's with the same task and seed), where that was run."""
    full = {(line["task"], line["seed"]): line["score"] for line in lines if line["method"] == "full"}
    found: dict[str, list[tuple[str, float]]] = {}
    for line in lines:
        if base := full.get((line["task"], line["seed"])):
            found.setdefault(line["method"], []).append((line["task"], line["score"] / base))
    return {name: found[name] for name in ORDER if name in found}


def summary(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """By method: score relative to full fine-tuning, its deviation over tasks and seeds, time, parameters, bytes.

    One run has no deviation.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, ratios in relative(lines).items():
        own = [line for line in lines if line["method"] == name]
        values = np.array([ratio for _, ratio in ratios])
        kinds = {kind: [ratio for task, ratio in ratios if TASKS[task].kind == kind] for kind in KINDS}
        result[name] = {
            "relative": float(values.mean()),
            **({"deviation": float(values.std(ddof=1))} if len(values) > 1 else {}),
            "runs": len(values),
            **{kind: float(np.mean(each)) for kind, each in kinds.items() if each},
            "seconds": float(np.median([line["seconds"] for line in own])),
            "parameters": float(np.median([line["parameters"] for line in own])),
            "bytes": float(np.median([line["bytes"] for line in own])),
        }
    return result


def tables(lines: Sequence[Line]) -> str:
    """Markdown: what each method costs and gives, and the scores of each task."""
    found = summary(lines)
    head = ["method", "of full, %", "deviation", *KINDS, "runs", "training, s", "parameters", "kB a task"]
    rows = [
        [
            name,
            f"**{100 * own['relative']:.1f}**",
            f"{100 * own['deviation']:.1f}" if "deviation" in own else "",
            *(f"{100 * own[kind]:.1f}" if kind in own else "" for kind in KINDS),
            str(own["runs"]),
            f"{own['seconds']:.0f}",
            f"{own['parameters']:,.0f}",
            f"{own['bytes'] / 1e3:,.0f}",
        ]
        for name, own in found.items()
    ]
    scores = [
        [name, task.metric.replace("_", " "), *(_scores(lines, name, method) for method in found)]
        for name, task in TASKS.items()
        if any(line["task"] == name for line in lines)
    ]
    return markdown_table(head, rows) + "\n\n" + markdown_table(["task", "score", *found], scores)


def _scores(lines: Sequence[Line], task: str, method: str) -> str:
    """The mean over the seeds in per cent, and from two seeds on the deviation."""
    own = [100 * line["score"] for line in lines if (line["task"], line["method"]) == (task, method)]
    if len(own) < 2:
        return f"{own[0]:.1f}" if own else ""
    return f"{np.mean(own):.1f} ± {np.std(own, ddof=1):.1f}"


def replace_tables(page: str, written: str, marks: tuple[str, str] = MARKS) -> str:
    """``page`` with other tables between the marks. Raises ``typer.BadParameter`` where it has none."""
    before, first, rest = page.partition(marks[0])
    _, last, after = rest.partition(marks[1])
    if not first or not last:
        raise typer.BadParameter(f"expected a page with {marks[0]} and {marks[1]}")
    return f"{before}{first}\n\n{written}\n\n{last}{after}"


def report(
    results: Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False)],
    page: Annotated[pathlib.Path | None, typer.Option(exists=True, help="page to put the tables into")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json", help="what figures.py draws")] = None,
) -> None:
    """Tables of a file of runs."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    settings = {**lines[0]["settings"], "runs": len(lines)}
    shared.report("debian-tasks", settings, summary(lines), json_out)
    if page is not None:
        page.write_text(replace_tables(page.read_text(), tables(lines)))
