"""Tables of scheduling: policies, fairness, and tasks that move between devices."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from results.documents import SERVED, Document
from results.engine_tables import methods
from results.markdown import MISSING, markdown_table, milliseconds, percent, ratio

POLICIES = ("fixed", "beta", "turbo", "length-buffer", "alpha", "coordinated", "packed", "auto")


def best_by_policy(document: Document) -> dict[str, Mapping[str, Any]]:
    """Figures by policy; of ``fixed`` those of the best batch size."""
    best: dict[str, Mapping[str, Any]] = {}
    for system, figures in document.systems.items():
        policy = "fixed" if system.startswith("fixed") else system
        if policy not in best or figures["qps"] > best[policy]["qps"]:
            best[policy] = figures
    return {name: best[name] for name in POLICIES if name in best}


def traffic(settings: Mapping[str, Any]) -> str:
    lengths = f"normal(32, {settings['std']:g})" if settings["lengths"] == "gaussian" else settings["lengths"]
    window = f", {settings['window']} wait at a time" if settings["window"] else ""
    without = "" if settings["best_fixed"] else "; run without `fixed`"
    return f"{settings['backbone']}, {methods(settings)}; {settings['queries']} queries, {lengths}{window}{without}"


def is_served(document: Document) -> bool:
    """Whether engines served the queries beside exact plans."""
    return any(name.startswith(SERVED) for name in document.systems)


def served(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for name, own in each.systems.items():
            share = percent(own["fallback_share"], 0) if "fallback_share" in own else MISSING
            over = ratio(own["over_packed"]) if "over_packed" in own else MISSING
            padding, rate = percent(own["linear_padding"], 1), f"{own['qps']:.0f}"
            rows.append([traffic(each.settings), f"`{name}`", rate, f"{own['batches']:.0f}", padding, share, over])
    head = [
        "traffic",
        "system",
        "queries/s",
        "batches a pass",
        "padding",
        "batches in fallbacks",
        "over exact `packed`",
    ]
    return markdown_table(head, rows, left=2)


def batching(found: Sequence[Document]) -> str:
    rates, padding, ratios = [], [], []
    for each in found:
        if is_served(each):
            continue
        best, case = best_by_policy(each), traffic(each.settings)
        rates.append([case, *(f"{best[name]['qps']:.0f}" if name in best else MISSING for name in POLICIES)])
        padding.append(
            [case, *(percent(best[name]["linear_padding"], 1) if name in best else MISSING for name in POLICIES)]
        )
        packed, auto = best["packed"], best["auto"]
        other = f"{ratio(packed['over_best_other'])} (`{packed['best_other']}`)"
        ratios.append(
            [case, ratio(packed.get("over_best_fixed")), other, f"{ratio(auto['over_best'])} (`{auto['best']}`)"]
        )
    head = ["traffic", *(f"`{name}`" for name in POLICIES)]
    over = ["traffic", "`packed` / best `fixed`", "`packed` / best of the papers'", "`auto` / best of all"]
    return (
        f"Queries a second:\n\n{markdown_table(head, rates)}\n\n"
        f"Tokens computed beyond those that there are, in linear sites:\n\n{markdown_table(head, padding)}\n\n"
        f"Paired ratios:\n\n{markdown_table(over, ratios)}\n\n"
        f"As served, after a warm-up, beside exact plans:\n\n{served([each for each in found if is_served(each)])}"
    )


def spread_cases(document: Document) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Figures by case and policy; of ``fixed`` those of the best batch size."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, own in document.systems.items():
        case, _, system = name.partition("/")
        policy, known = "fixed" if system.startswith("fixed") else system, cases.setdefault(case, {})
        if policy not in known or own["qps"] > known[policy]["qps"]:
            known[policy] = own
    return cases


def spread(found: Sequence[Document]) -> str:
    parts = []
    for each in found:
        rows = []
        for case, best in spread_cases(each).items():
            rates = [f"{best[name]['qps']:.0f}" if name in best else MISSING for name in POLICIES[:-1]]
            ratios = [ratio(best.get("coordinated", {}).get(f"over_{name}")) for name in ("alpha", "beta")]
            rows.append([case, *rates, *ratios])
        names = [f"`{name}`" for name in POLICIES[:-1]]
        head = ["lengths, tasks", *names, "`coordinated` / `alpha`", "`coordinated` / `beta`"]
        kept = [at for at in range(len(head)) if any(row[at] for row in rows)]
        table = markdown_table([head[at] for at in kept], [[row[at] for at in kept] for row in rows])
        settings = each.settings
        parts.append(f"{settings['backbone']}, {methods(settings)}, {settings['queries']} queries:\n\n{table}")
    return "\n\n".join(parts)


def tenants(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for name, own in each.systems.items():
            system, _, load = name.partition(", load ")
            times = [milliseconds(own[key]) for key in ("alone_p50", "beside_p50", "alone_p99", "beside_p99")]
            counts = f"{own['served']:.0f}", str(own.get("compiled", MISSING))
            rows.append([system, each.cpu, load, *times, f"{own['ratio']:.2f}", *counts])
    head = ["order", "machine", "load / share", "p50 alone, ms", "p50 beside", "p99 alone", "p99 beside", "p99 ratio"]
    return markdown_table([*head, "queries/s of both", "programs compiled a round"], rows, left=2)


MIGRATION = {
    "none": "no migration",
    "fixed": "Algorithm 3, every 10 s",
    "adaptive": "Algorithm 3, adaptive",
    "ours": "ours, adaptive",
    "anywhere": "every task everywhere",
}


def migration(found: Sequence[Document]) -> str:
    parts = []
    for each in found:
        points = each.systems["none"]["points"]
        for devices in dict.fromkeys(point["devices"] for point in points):
            tasks = [point["tasks"] for point in points if point["devices"] == devices]
            rows = [
                [label, *(_gain(point) for point in each.systems[name]["points"] if point["devices"] == devices)]
                for name, label in MIGRATION.items()
                if name != "none" and name in each.systems
            ]
            parts.append(f"{devices} devices:\n\n{markdown_table(['tasks', *map(str, tasks)], rows)}")
    return "\n\n".join(parts)


def interval(found: Sequence[Document]) -> str:
    redraws = sorted({point["redraw"] for each in found for point in each.systems["none"]["points"]})
    rows = []
    for each in found:
        for name, label in MIGRATION.items():
            if name != "none" and name in each.systems:
                gains = {point["redraw"]: _gain(point) for point in each.systems[name]["points"]}
                rows.append([label, f"{each.settings['seeds']}", *(gains.get(at, MISSING) for at in redraws)])
    return markdown_table(["calls change every", "draws", *(f"{at:g} s" for at in redraws)], rows)


def _gain(point: Mapping[str, Any]) -> str:
    """Mean over the draws, with its standard error from ten draws on."""
    gains = [100 * gain for gain in point["gains"]]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) >= 10 else None
    return f"{statistics.mean(gains):+.1f} %" + (f" ± {error:.1f}" if error is not None else "")


def validation(found: Sequence[Document]) -> str:
    rows = [
        [
            name,
            f"{own['qps']:.0f}",
            f"{own['simulated_qps']:.0f}",
            f"{own['qps_of_simulated']:.2f}",
            f"{own['p50_ms'] / own['simulated_p50_ms']:.2f}",
        ]
        for each in found
        for name, own in each.systems.items()
    ]
    head = ["devices, migration", "real, queries/s", "simulated, queries/s", "ratio", "ratio of median latencies"]
    return markdown_table(head, rows)
