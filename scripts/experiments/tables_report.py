"""The tables of ``experiments.area_domains``, and of ``experiments.debian_tasks`` over tables, for the page.

python -m experiments.tables_report docs/results/cpu-2core --page docs/experiments.md
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from results.markdown import markdown_table

from experiments.area_domains import AREA_TASKS, SHARES, VARIANTS
from experiments.debian_report import replace_tables
from experiments.package_tasks import TASKS

Line = Mapping[str, Any]
MARKS = ("<!-- tables: written by experiments.tables_report -->", "<!-- end of tables of n-grams -->")
NAMES = {
    "full": "full fine-tuning",
    "whole-lora": "lora, all layers",
    "whole-frozen": "head alone, all layers",
    "root-lora": "lora over the root",
    "root-frozen": "head alone over the root",
    "domain-lora": "lora over the area's table",
    "domain-frozen": "head alone over the area's table",
}


def read(folder: pathlib.Path, name: str) -> list[Line]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def relative(
    lines: Sequence[Line], own: Callable[[Line], str], base: str, key: Callable[[Line], object]
) -> dict[str, list[float]]:
    """By ``own`` of a line, its scores over those of ``base`` with the same ``key``."""
    full = {key(line): line["score"] for line in lines if own(line) == base}
    found: dict[str, list[float]] = {}
    for line in lines:
        if other := full.get(key(line)):
            found.setdefault(own(line), []).append(line["score"] / other)
    return found


def per_cent(ratios: Sequence[float]) -> str:
    """The mean, and from two on its standard error."""
    values = 100 * np.array(ratios)
    if len(values) < 2:
        return f"{values[0]:.1f}" if len(values) else ""
    return f"{values.mean():.1f} ± {values.std(ddof=1) / np.sqrt(len(values)):.1f}"


def of_tasks(whole: Sequence[Line], tables: Sequence[Line]) -> str:
    """The fourteen tasks: each method over tables, beside what it keeps over all layers."""
    seeds = {(line["task"], line["seed"]) for line in tables}
    lines = [line for line in whole if (line["task"], line["seed"]) in seeds]
    methods = list(dict.fromkeys(line["method"] for line in tables))
    full = [line for line in lines if line["method"] == "full"]

    def found(source: Sequence[Line], method: str) -> str:
        own = [*full, *(line for line in source if line["method"] == method)]
        ratios = relative(own, lambda line: line["method"], "full", lambda line: (line["task"], line["seed"]))
        return per_cent(ratios.get(method, []))

    rows = [[method, f"**{found(tables, method)}**", found(lines, method)] for method in methods]
    table = markdown_table(["method", "over tables, % of full", "over all layers, % of full"], rows)
    scores = [
        [name, *(_mean(source, name, method) for source, method in [(full, "full"), *((tables, m) for m in methods)])]
        for name in TASKS
        if any(line["task"] == name for line in tables)
    ]
    return table + "\n\n" + markdown_table(["task", "full", *methods], scores)


def _mean(lines: Sequence[Line], task: str, method: str) -> str:
    own = [100 * line["score"] for line in lines if (line["task"], line["method"]) == (task, method)]
    return f"{np.mean(own):.1f}" if own else ""


def of_areas(lines: Sequence[Line]) -> str:
    """Each variant over full fine-tuning, where that was run, by area and altogether; then what an area's own table
    adds."""
    key = lambda line: (line["area"], line["task"], line["seed"])  # noqa: E731
    variant = lambda line: line["variant"]  # noqa: E731
    every = relative(lines, variant, "full", key)
    known = [name for name in VARIANTS if name in every]
    rows = [[NAMES[name], f"**{per_cent(every[name])}**", str(len(every[name]))] for name in known]
    areas = []
    for area in AREA_TASKS:
        own = relative([line for line in lines if line["area"] == area], variant, "full", key)
        if own:
            areas.append([area, *(f"{100 * np.mean(own[name]):.1f}" if own.get(name) else "" for name in known)])
    gains = []
    for method in ("lora", "frozen"):
        if found := relative(lines, variant, f"root-{method}", key).get(f"domain-{method}", []):
            gains.append(["lora" if method == "lora" else "head alone", per_cent(found), str(len(found))])
    over_full = [
        markdown_table(["variant", "% of full fine-tuning", "runs"], rows),
        markdown_table(["area", *(NAMES[name] for name in known)], areas),
    ]
    over_root = markdown_table(["method", "area's table, % of the root alone", "runs"], gains)
    return "\n\n".join([*(over_full if known else []), over_root])


def of_shares(lines: Sequence[Line]) -> str:
    """What a domain's table costs and gives by the share of occurrences that it holds."""
    rows = []
    for share in map(str, SHARES):
        own = [line["shares"][share] for line in lines]
        whole = [line["shares"][str(SHARES[0])] for line in lines]
        rows.append(
            [
                f"{float(share):.0%}",
                f"{np.mean([each['entries'] for each in own]):,.0f}",
                f"{np.mean([each['bytes'] for each in own]) / 1e6:.1f}",
                per_cent([each["entries"] / other["entries"] for each, other in zip(own, whole, strict=True)]),
                f"{np.mean([each['domain'] for each in own]):.1%}",
                per_cent([each["score"] / other["score"] for each, other in zip(own, whole, strict=True)]),
            ]
        )
    head = ["share", "entries", "MB", "entries, % of all", "test tokens found there", "score, % of that of all"]
    return markdown_table(head, rows)


def of_variants(whole: Sequence[Line], lines: Sequence[Line]) -> str:
    """What tasks keep of full fine-tuning over each variant's tables, and what these take."""
    full = [{**line, "variant": "full"} for line in whole if line["method"] == "full"]
    kept = relative([*full, *lines], lambda line: line["variant"], "full", lambda line: (line["task"], line["seed"]))
    tasks = [name for name in TASKS if any(line["task"] == name for line in lines)]
    rows = []
    for name in dict.fromkeys(line["variant"] for line in lines):
        own = [line for line in lines if line["variant"] == name]
        first, table = own[0], own[0]["table"]
        sizes = [f"{table['entries']:,}", f"{table['bytes'] / 1e6:,.0f}"]
        scores = [_mean(own, task, first["method"]) for task in tasks]
        ratio = per_cent(kept.get(name, []))
        rows.append([str(first["layers"]), str(first["ngram"]), *sizes, f"**{ratio}**", *scores])
    return markdown_table(["lower layers", "n", "entries", "MB", "% of full fine-tuning", *tasks], rows)


def main(
    folder: Annotated[pathlib.Path, typer.Argument(exists=True, file_okay=False, help="of results")],
    page: Annotated[pathlib.Path | None, typer.Option(exists=True, help="page to put the tables into")] = None,
) -> None:
    """Print the tables, or put them into a page."""
    parts = []
    if tables := read(folder, "debian-tasks-tables.jsonl"):
        parts.append(of_tasks(read(folder, "debian-tasks-whole.jsonl"), tables))
    if areas := read(folder, "area-domains.jsonl"):
        parts.append(of_areas(areas))
    if shares := read(folder, "area-shares.jsonl"):
        parts.append(of_shares(shares))
    if variants := read(folder, "table-variants.jsonl"):
        parts.append(of_variants(read(folder, "debian-tasks-whole.jsonl"), variants))
    written = "\n\n".join(parts)
    if page is None:
        typer.echo(written)
    else:
        page.write_text(replace_tables(page.read_text(), written, MARKS))


if __name__ == "__main__":
    typer.run(main)
