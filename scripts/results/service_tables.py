"""Tables of a server: over HTTP, at its start, with very many tasks, and beside training."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from results.documents import RESULTS, ROOT, Document, read_lines
from results.markdown import MISSING, markdown_table, milliseconds, percent, ratio
from results.sustained import Sustained, sustained

SYSTEMS = {
    "pets": "jpets",
    "before": "an earlier jpets",
    "single": "no batching",
    "naive": "one padded batch",
}
TARGETS = (0.1, 0.2)
"""Limit of the p99 in seconds."""


def serving(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        first = {name: own["curve"][0] for name, own in each.systems.items()}
        kept = {name: point["p99"] <= each.settings["target"] for name, point in first.items()}
        best = {name: sustained(own["curve"], each.settings["target"]) for name, own in each.systems.items()}
        for name, own in each.systems.items():
            most = [
                max((point["rate"] for point in own["curve"] if point["p99"] <= limit), default=None)
                for limit in TARGETS
            ]
            rows.append(
                [
                    SYSTEMS[name],
                    each.cpu,
                    each.settings["lengths"] + (", five methods" if each.settings.get("mix") else ""),
                    f"{best[name].rate:.0f}" if kept[name] else f"under {first[name]['rate']:.0f}",
                    _times_as_many(each, best, name, kept) if name != "pets" else MISSING,
                    *(f"{rate:.0f}" if rate is not None else MISSING for rate in most[1:]),
                    f"{own['most_responses']:.0f}",
                ]
            )
    head = ["system", "machine", "lengths", "requests/s with p99 in 100 ms", "jpets has times as many"]
    head += ["highest rate tried with p99 in 200 ms", "most answers/s at the rates tried"]
    return markdown_table(head, rows, left=3)


def _times_as_many(document: Document, best: Mapping[str, Sustained], name: str, kept: Mapping[str, bool]) -> str:
    """jpets's rate over another system's, or a limit where one of them kept no rate that was tried. Loads are compared
    where there are any: each round's rates are shares of what the machine did then."""
    unit = "rate" if best["pets"].load is None else "load"
    pets, other = (getattr(best[each], unit) for each in ("pets", name))
    least = {each: own["curve"][0][unit] for each, own in document.systems.items()}
    if not kept["pets"]:
        return f"under {least['pets'] / other:.2f}" if kept[name] else MISSING
    if not kept[name]:
        return f"over {pets / least[name]:.2f}"
    return f"{pets / other:.2f}"


def infinity(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        jpets, other = each.systems["pets"], each.systems["infinity"]
        for count in each.settings["connections"].split(","):
            times = [milliseconds(system[f"latency_{count}"]) for system in (jpets, other)]
            rates = [f"{system[f'qps_{count}']:.0f}" for system in (jpets, other)]
            rows.append([each.cpu, count, *times, *rates, ratio(other[f"pets_ratio_{count}"])])
    head = [
        "machine",
        "connections",
        "jpets, median ms",
        "Infinity, median ms",
        "jpets, requests/s",
        "Infinity, requests/s",
    ]
    return markdown_table([*head, "ratio of requests/s"], rows)


def startup(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for name, label in (("cold", "empty cache"), ("warm", "warm cache")):
            own = each.systems[name]
            rows.append([label, f"{own['seconds']:.1f}", f"{own['worst']:.1f}"])
        rows.append(["resident memory when ready, GB", f"{each.settings['resident_bytes'] / 1e9:.1f}", MISSING])
    return markdown_table(["start of the demo", "median s", "worst s"], rows)


def soak() -> str:
    own = json.loads((RESULTS / "cpu-2core" / "soak-10000.json").read_text())
    phases = {"while_compiling": "while programs compile in the background", "afterwards": "afterwards"}
    rows = [
        [label, f"{own['requests'][key]:,}", *(milliseconds(own[at][key]) for at in ("p50_seconds", "p99_seconds"))]
        for key, label in phases.items()
    ]
    others = [
        ["computed tokens per real token", f"{own['computed_per_real_token']:.2f}"],
        ["compilations that a query waited for", f"{own['request_path_compiles']:.0f}"],
        ["programs compiled in the background", f"{own['background_programs']:.0f}"],
        ["batches for which a better program was missing", percent(own["fallback_share"])],
        ["resident memory, GB", f"{own['resident_bytes'] / 1e9:.2f}"],
    ]
    if "missed_share" in own:
        others.append(["their loss, of the time that batches were predicted to take", percent(own["missed_share"])])
    return f"{markdown_table(['', 'requests', 'p50, ms', 'p99, ms'], rows)}\n\n{markdown_table(['in all', ''], others)}"


def two_servers() -> str:
    runs = {
        "50 uploads, 100 queries a second": "two-servers-postgresql.json",
        "10 uploads, 20 queries a second": "two-servers-postgresql-10.json",
    }
    found = [json.loads((RESULTS / "cpu-2core" / name).read_text()) for name in runs.values()]
    rows = [
        ["changes", *(_counts(own["changes"], " of kind ") for own in found)],
        ["uploads a second", *(f"{own['uploads_a_second']:.1f}" for own in found)],
        ["seconds until the other server had a change, median and worst",
         *(f"{own['median_seconds']:.2f}, {own['worst_seconds']:.2f}" for own in found)],
        ["uploads lost", *(f"{own['uploads_lost']}" for own in found)],
        ["queries that named a version, answered", *(_counts(own["queries"], " ") for own in found)],
    ]  # fmt: skip
    return markdown_table(["asked for", *runs], rows, left=3)


def _counts(found: Mapping[str, int], between: str) -> str:
    return ", ".join(f"{count}{between}{what}" for what, count in found.items())


def costs(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        first, later = each.systems["meanwhile"], each.systems["afterwards"]
        rows.append(
            [
                f"{first['measured']} of {first['classes']} classes",
                f"{first['seconds']:.0f}",
                *(milliseconds(own[name]) for name in ("p50", "p99") for own in (first, later)),
                f"{first['p99'] / later['p99']:.2f}",
            ]
        )
    head = ["measured", "s after ready", "p50 meanwhile, ms", "next start", "p99 meanwhile, ms", "next start", "ratio"]
    return markdown_table(head, rows)


def quotas(found: Sequence[Document]) -> str:
    rows = [
        [
            "tokens" if each.settings.get("tokens") else "requests",
            name,
            f"{own['others_asked']:.0f}",
            f"{own['others_answered']:.0f}",
            milliseconds(own["p50"]),
            milliseconds(own["p99"]),
            f"{own['p99_ratio']:.2f}",
        ]
        for each in found
        for name, own in each.systems.items()
    ]
    head = ["quota of", "beside", "it asks, /s", "is answered, /s", "p50, ms", "p99, ms", "p99 over alone"]
    return markdown_table(head, rows, left=2)


def references(found: Sequence[Document]) -> str:
    rows = [
        [name, str(own["answers"]), f"{own['difference']:.1e}", str(own["unequal"]), str(own.get("known", MISSING))]
        for each in found
        for name, own in each.systems.items()
    ]
    head = ["head, and the client that asks", "answers", "largest difference", "else unequal", "known to differ"]
    return markdown_table(head, rows)


def uploads(found: Sequence[Document]) -> str:
    rows = [
        [name, f"{each.settings['tasks']:,}", f"{own['rate']:.0f}", f"{min(own['rates']):.0f}"]
        for each in found
        for name, own in each.systems.items()
    ]
    return markdown_table(["into a", "files", "files/s", "slowest command, files/s"], rows)


def registered(found: Sequence[Document]) -> str:
    rows = [
        [
            name,
            f"{own['seconds']:.1f}",
            *(milliseconds(own[key]) for key in ("query_seconds", "slowest_query_seconds")),
            f"{own['brought']:.0f}",
            f"{own['resident_bytes'] / 1e9:.2f}",
        ]
        for each in found
        for name, own in each.systems.items()
    ]
    head = ["", "start to ready, s", "median query, ms", "slowest query, ms"]
    head += ["tasks brought at start and for the queries", "resident after them, GB"]
    return markdown_table(head, rows)


def domains(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        memory, tables = each.systems["memory"], each.systems["tables"]
        rows.append(
            [
                f"{each.settings['tasks']:,} over {each.settings['domains']}",
                f"{tables['entries']:,}, {tables['bytes'] / 1e9:.2f} GB",
                f"{each.systems['traffic']['texts']:,}",
                *(f"{memory[key] / 1e9:.2f}" for key in ("before", "announced", "after")),
                f"{memory['ratio']:.3f}",
            ]
        )
    head = ["tasks over domains", "n-grams of all tables", "texts", "at the start, GB", "announced, GB", "taken, GB"]
    return markdown_table([*head, "taken / announced"], rows, left=2)


ARRIVALS = {
    "paged": "tasks come while batches run",
    "eager": "tasks come when nothing else is left to do",
    "swapping": "whole models swapped",
    "resident": "all on the device",
}


def arrivals(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for name, own in each.systems.items():
            case, side = name.split("/")
            kind, amount = case.split()
            label = f"{amount} queries/s" if kind == "rate" else f"{amount} of HMI's burst"
            rows.append(
                [label, ARRIVALS[side], f"{own['queries']:,}", milliseconds(own["p50"]), milliseconds(own["p99"])]
            )
    return markdown_table(["load", "system", "queries", "p50, ms", "p99, ms"], rows, left=2)


def growth(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for case in dict.fromkeys(name.partition("/")[0] for name in each.systems):
            paged, swapping = (each.systems[f"{case}/{side}"] for side in ("paged", "swapping"))
            rates = [f"{own['qps']:.0f}" for own in (paged, swapping)]
            times = [
                milliseconds(own[key]) if key in own else MISSING for own in (paged, swapping) for key in ("p50", "p99")
            ]
            rows.append(
                [case.removesuffix(" tenants"), *rates, ratio(paged["over_swapping"]), f"{paged['arrivals']:,}", *times]
            )
    head = ["tenants", "jpets, queries/s", "models swapped, queries/s", "ratio", "arrivals"]
    return markdown_table([*head, "jpets, p50 ms", "p99", "swapped, p50 ms", "p99"], rows)


def training(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        own, together = each.settings, each.systems["together"]
        case = f"{own['tasks']} {own['method']} tasks, {own['batch']} texts each a step, {each.cpu}"
        seconds = [f"{each.systems[name]['seconds']:.2f}" for name in ("apart", "together")]
        rows.append([case, *seconds, ratio(together["time_share"]), f"{together['largest_loss_difference']:.1e}"])
    head = ["updates", "one after another, s", "together, s", "share of the time", "largest difference of a loss"]
    return markdown_table(head, rows)


def jobs(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for rate, own in each.systems.items():
            times = [milliseconds(own[key]) for key in ("p50 alone", "p50 beside", "p99 alone", "p99 beside")]
            p50, p99 = (own[f"p{percent} beside"] / own[f"p{percent} alone"] for percent in (50, 99))
            spread = f"{p99:.2f} ({min(own['p99 ratios']):.2f} to {max(own['p99 ratios']):.2f})"
            rows.append([rate, *times, f"{p50:.2f}", spread])
    head = ["requests", "p50 alone, ms", "p50 beside a job", "p99 alone", "p99 beside a job"]
    return markdown_table([*head, "ratio of p50", "ratio of p99 (range of rounds)"], rows)


def students(found: Sequence[Document]) -> str:
    """Of each file one text at a time and many at once, then the day."""
    tables = []
    for each in found:
        teachers = [name for name in each.systems if name.startswith("teacher")]
        alone = {name: own for name, own in each.systems.items() if "mean_ms" in own}
        rows = [
            [
                name,
                f"{own['mean_ms']:.1f}",
                f"{own['p95_ms']:.1f}",
                *(ratio(own[f"of {teacher}"]) if f"of {teacher}" in own else MISSING for teacher in teachers),
                f"{own['qps']:.0f}",
                *(ratio(own[f"rate / {other}"]) if f"rate / {other}" in own else MISSING for other in teachers),
            ]
            for name, own in alone.items()
        ]
        many = each.systems["many groups"]
        told = [f"{each.settings['groups']} groups together", MISSING, MISSING, *[MISSING] * len(teachers)]
        told += [f"{many['qps']:.0f}, {ratio(many['rate / one by one'])} x one by one", *[MISSING] * len(teachers)]
        head = ["system", "one text, mean ms", "p95 ms", *(f"/ {name}" for name in teachers)]
        head += ["queries/s", *(f"/ {name}" for name in teachers)]
        tables.append(markdown_table(head, [*rows, told]))
        days = [(name, own) for name, own in each.systems.items() if name.startswith("day, ")]
        if days:
            tables.append(_days(days))
    return "\n\n".join(tables)


def _days(days: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    rows = [
        [
            name.removeprefix("day, "),
            *(f"{own[key]:.0f}" for key in ("target_ms", "p95_ms", "p95_in_bursts_ms", "p95_between_ms")),
            percent(own["in_target"], 1),
            *(f"{own[key]:.2f}" for key in ("students", "students_in_bursts")),
            str(own.get("refused", 0)),
            "yes" if own["whole_again"] else "no",
        ]
        for name, own in days
    ]
    head = ["a day with bursts", "target, ms", "p95, ms", "in bursts", "between", "in target"]
    return markdown_table([*head, "students, mean", "in bursts", "refused", "whole again"], rows)


def small_tasks() -> str:
    scores: dict[str, list[float]] = {}
    for line in read_lines(RESULTS / "cpu-2core" / "small-tasks.jsonl"):
        scores.setdefault(line["method"], []).append(line["accuracy"])
    rows = [[name, str(len(own)), f"{statistics.mean(own):.3f}"] for name, own in scores.items()]
    return markdown_table(["by", "tasks", "mean accuracy"], rows)


def debian(found: Sequence[Document]) -> str:
    rows = [
        [name, percent(own["relative"], 1), str(own["runs"]), f"{own['bytes'] / 1e3:,.0f}"]
        for each in found
        for name, own in each.systems.items()
    ]
    return markdown_table(["method", "score / full fine-tuning", "runs", "kB a task"], rows)


def demo_tasks() -> str:
    folder = ROOT / "checkpoints" / "demo"
    rows = []
    for name, own in json.loads((folder / "results.json").read_text()).items():
        size = (folder / f"{name}.safetensors").stat().st_size / 1e3
        scores = [f"{100 * own[key]:.1f}" for key in ("majority", "frozen", "accuracy", "full")]
        rows.append([name, own["method"], f"{size:,.0f}", f"{own['train']:,}", f"{own['test']:,}", *scores])
    head = ["task", "method", "kB", "texts", "tested on", "majority", "frozen backbone", "**task**", "full fine-tuning"]
    return markdown_table(head, rows, left=2)
