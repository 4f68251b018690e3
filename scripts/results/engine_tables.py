"""Tables of one engine: throughput, shares of time, room, order of operators, many tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from results.documents import Document
from results.markdown import MISSING, markdown_table, milliseconds, percent, ratio

PETS_TASKS = {"bert-base": 2164, "distilbert": 4344, "bert-large": 560}
"""PetS table 5: the most tasks in 32 GB, of its four methods."""
PETS_METHODS = {"adapter", "bitfit", "mask", "diff"}


def methods(settings: Mapping[str, Any]) -> str:
    return settings["methods"].replace(",", ", ")


def throughput(found: Sequence[Document]) -> str:
    rows = []
    for each in sorted(found, key=lambda one: -one.systems["backbone"]["pets_ratio"]["median"]):
        own, systems = each.settings, each.systems
        lengths = f"normal({own['length']}, {own['length_std']:g})" if own["length_std"] else f"{own['length']}"
        merged = f"; {own['merged_tasks']} tasks have merged copies" if own["merged_tasks"] else ""
        rows.append(
            [
                methods(own) + merged,
                f"{own['tasks']} x {own['per_task_batch']} x {lengths}",
                f"{systems['pets']['qps']:.1f}",
                *(ratio(systems.get(name, {}).get("pets_ratio")) for name in ("backbone", "seqs", "pars", "stacked")),
            ]
        )
    head = ["methods", "tasks x queries x tokens", "jpets, queries/s"]
    return markdown_table([*head, "/ `backbone`", "/ `seqs`", "/ `pars`", "/ `stacked`"], rows, left=2)


COPIES = {"single": "one task alone", "seqs": "`seqs`", "pars": "`pars`", "stacked": "`stacked`"}


def curve_points(document: Document, system: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Figures of a system by shape and number of tasks."""
    points: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name, own in document.systems.items():
        place, _, side = name.partition("/")
        shape, _, count = place.partition(" ")
        if side == system:
            points.setdefault(shape, {})[int(count)] = own
    return points


def curve(found: Sequence[Document]) -> str:
    parts = []
    for each in found:
        pets, counts = curve_points(each, "pets"), each.settings["tasks"].split(",")
        rows = []
        for shape, points in pets.items():
            of_shape = f"{shape.replace('x', ' x ')}"
            rows.append([of_shape, "queries/s", *(f"{points[int(count)]['qps']:.1f}" for count in counts)])
            rows.append([of_shape, "batches", *(f"{points[int(count)]['batches']:.0f}" for count in counts)])
            for side, label in COPIES.items():
                if own := curve_points(each, side).get(shape):
                    rows.append(
                        [of_shape, f"/ {label}", *(f"{own[int(n)]['pets_ratio']['median']:.2f}" for n in counts)]
                    )
        head = ["queries a task x tokens", "jpets", *(f"{count} tasks" for count in counts)]
        parts.append(f"{each.settings['backbone']}, {methods(each.settings)}:\n\n{markdown_table(head, rows, left=2)}")
    return "\n\n".join(parts)


def breakdown(found: Sequence[Document]) -> str:
    parts = []
    for each in found:
        own, medians, names = each.systems["pets"], each.settings["medians"], each.settings["methods"].split(",")
        rows = [
            [name, percent(share), _each_task(medians, name, len(range(at, each.settings["tasks"], len(names))))]
            for at, (name, share) in enumerate(own["shares"].items())
        ]
        seconds = [
            ["batch with all methods", milliseconds(medians["batch"])],
            *([name, milliseconds(medians[name])] for name in medians if name.startswith("without ")),
            ["bare backbone", milliseconds(medians["bare"])],
        ]
        parts += [markdown_table(["part", "share of a batch's time", "ms for each task of the method"], rows)]
        parts += [markdown_table(["batch", "ms"], seconds)]
    return "\n\n".join(parts)


def _each_task(medians: Mapping[str, float], method: str, tasks: int) -> str:
    """Additional time of a batch for each of ``tasks`` tasks of a method; empty for other parts."""
    if (without := medians.get(f"without {method}")) is None:
        return MISSING
    more = (medians["batch"] - without) / tasks
    return milliseconds(more) if more >= NOISE else "under the noise"


NOISE = 5e-3
"""Seconds for each task. Less than this is lost in the difference of two medians of half a second and more."""


def scaling(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        few, many, systems = each.settings["few"], each.settings["many"], each.systems
        over = {"few": ratio(systems["few"]["over_one_each"]), "many": ratio(systems["many"]["over_few"])}
        rows += [
            ["one task a method", f"{systems['one-each']['qps']:.1f}", MISSING],
            [
                f"{few} tasks",
                f"{systems['few']['qps']:.1f}",
                f"{over['few']} x the row above",
            ],
            [
                f"{few} of {many:,} tasks on the device",
                f"{systems['many']['qps']:.1f}",
                f"{over['many']} x the row above",
            ],
        ]
    return markdown_table(["batch of", "queries/s", "ratio"], rows)


class Capacity(NamedTuple):
    """The runs of one backbone: five methods, and the four that PetS has."""

    backbone: str
    five: Document
    four: Document | None


def capacities(found: Sequence[Document]) -> list[Capacity]:
    """By backbone, in order of how many tasks PetS fits."""
    result = []
    for name in sorted({each.settings["backbone"] for each in found}, key=lambda name: -PETS_TASKS.get(name, 0)):
        own = [each for each in found if each.settings["backbone"] == name]
        four = next((one for one in own if set(one.settings["methods"].split(",")) == PETS_METHODS), None)
        result.append(Capacity(name, next(one for one in own if one is not four), four))
    return result


def capacity(found: Sequence[Document]) -> str:
    counts, sizes = [], []
    for name, five, four in capacities(found):
        mixed = [f"{one.systems['mixed']['tasks']:,}" if one else MISSING for one in (five, four)]
        counts.append([name, *mixed, f"{PETS_TASKS[name]:,}", f"{five.systems['seqs']['tasks']:,}"])
        sizes.append([name, *(f"{own['bytes_per_task'] / 1e6:.2f}" for own in five.systems.values())])
    labels = {"mixed": "one of five", "seqs": "merged copy"}
    systems = [labels.get(key, key) for key in capacities(found)[0].five.systems]
    head = ["backbone", "jpets, five methods", "jpets, PetS's four", "PetS (its table 5)", "merged copies"]
    return (
        f"Tasks in {found[0].settings['budget_gb']:g} GB:\n\n{markdown_table(head, counts)}\n\n"
        f"MB a task:\n\n{markdown_table(['backbone', *systems], sizes)}\n\n{_checked(found)}"
    )


def _checked(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        mixed = each.systems["mixed"]
        live = f"{mixed['check_live']:,} / {mixed['check_accounted']:,}"
        rows.append([each.label, f"{each.settings['check_gb']:g}", f"{mixed['check_tasks']:,}", live])
    head = ["file", "GB filled with real banks", "tasks in them", "bytes of live arrays / accounted"]
    return f"The same run, with real arrays:\n\n{markdown_table(head, rows)}"


def memory(found: Sequence[Document]) -> str:
    labels = {"chunks": "chunks that are kept", "arena": "one arena a request", "programs": "XLA, by bucket"}
    rows = [
        [labels[name], *(f"{own[key]:.1f}" for key in ("largest_mb", "mean_mb", "new_mb"))]
        for each in found
        for name, own in each.systems.items()
    ]
    return markdown_table(["allocator", "largest, MB", "mean, MB", "new a request, MB"], rows)


def operators(found: Sequence[Document]) -> str:
    rows = [
        [
            f"{each.settings['tasks']} x {each.settings['length']}",
            name,
            f"{each.systems['fifo']['qps']:.0f}",
            f"{own['qps']:.0f}",
            ratio(own["fifo_ratio"]),
        ]
        for each in found
        for name, own in each.systems.items()
        if name != "fifo"
    ]
    head = ["tasks x tokens", "order", "queries/s in the classes' order", "queries/s in this one", "ratio"]
    return markdown_table(head, rows, left=2)


def programs(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        for name, own in each.systems.items():
            group, bucket, variant = name.split()
            calls = ", ".join(f"{count} {call.strip('_')}" for call, count in own["custom_calls"].items())
            counts = (own[key] for key in ("loops", "scatters", "shared_scatters", "arguments"))
            largest = f"{own['largest_bytes'] / 2**20:.0f}"
            rows.append([each.settings["candidates"], group, bucket, variant, calls, *map(str, counts), largest])
    head = ["operators", "methods", "bucket", "classes", "custom calls"]
    more = ["loops", "scatters", "of these shared", "arguments", "largest temporary, MiB"]
    return markdown_table([*head, *more], rows, left=len(head))


def layerwise(found: Sequence[Document]) -> str:
    rows = [
        [
            name,
            *(f"{own[key]:.0f}" for key in ("resident_ms", "coarse_ms", "layerwise_ms")),
            ratio(own["layerwise_of_coarse"]),
        ]
        for each in found
        for name, own in each.systems.items()
    ]
    head = ["tasks of the batch", "all there, ms", "brought whole, ms", "layer by layer, ms", "speed by layers / whole"]
    return markdown_table(head, rows)


def fanout(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        own, shared = each.settings, each.systems["fanout"]["seconds"]
        asked = f"{own['backbone']}, {own['tasks']} tasks of {own['methods'].replace(',', ', ')}"
        asked += f"; a text of {own['length']} tokens"
        for name, figures in each.systems.items():
            if name != "fanout":
                times = milliseconds(shared), milliseconds(figures["seconds"])
                rows.append([asked, OTHERS[name], *times, ratio(figures["times_fanout"])])
    return markdown_table(["asked", "beside", "layers shared, ms", "beside it, ms", "times as long"], rows, left=2)


OTHERS = {
    "ordinary": "one ordinary batch",
    "transformers float32": "whole models of transformers in turn, f32",
    "transformers bfloat16": "whole models of transformers in turn, bf16",
}


def lookup(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        own, opening = each.settings, each.systems["opening"]
        entries = f"{own['entries']:,} {own['ngram']}-grams of {own['width']}, {opening['bytes'] / 1e9:.1f} GB"
        cores = "one core" if own["one_core"] else "all cores"
        rows += [
            [entries, f"{name}, {cores}", f"{figures['tokens_per_second']:,.0f} tokens/s"]
            for name, figures in each.systems.items()
            if name != "opening"
        ]
        rows.append([entries, "opening", f"{opening['seconds']:.2f} s"])
    return markdown_table(["table", "what", "measured"], rows, left=2)


def hierarchical(found: Sequence[Document]) -> str:
    rows, others = [], ("whole", "upper", "staged")
    for each in found:
        own, systems = each.settings, each.systems
        rows.append(
            [
                f"{own['backbone']}, the lowest {own['layers']} layers",
                f"{own['tasks']} of {methods(own)}",
                f"{own['tasks'] * own['per_task_batch']} x {own['length']}",
                f"{systems['tables']['qps']:.1f}",
                *(ratio(systems[name]["tables_ratio"]) if name in systems else "" for name in others),
            ]
        )
    head = ["tables stand for", "tasks", "batch", "queries/s", "/ whole network", "/ upper layers alone", "/ staged"]
    return markdown_table(head, rows, left=3)


TRAFFIC = {"zipf": "by Zipf's law", "uniform": "evenly over all", "hot": "32 tasks of them"}


def paging(found: Sequence[Document]) -> str:
    """Leaves out the side that brings tasks only when nothing else is left to do: it had not read any task before."""
    rows = []
    for each in found:
        for name, own in each.systems.items():
            traffic, side = name.split("/")
            if side == "paged":
                base = "resident" if f"{traffic}/resident" in each.systems else "few"
                rows.append(
                    [
                        TRAFFIC[traffic],
                        f"{each.systems[f'{traffic}/{base}']['qps']:.0f}",
                        f"{own['qps']:.0f}",
                        ratio(own[f"over_{base}"]),
                        f"{own['brought']:.0f} of {each.settings['queries']:,}",
                        f"{own['host_bytes'] / 1e9:.1f}",
                    ]
                )
    head = ["queries", "all on the device, queries/s", "paged, queries/s", "ratio", "bring a task", "host memory, GB"]
    return markdown_table(head, rows)


PREDICTED_BY = {
    "profile": "the cost profile alone",
    "engine": "an engine, which learnt from other batches",
}


def prediction(found: Sequence[Document]) -> str:
    rows = [
        [f"{each.settings['batches']} random batches, by {PREDICTED_BY[name]}", *(percent(own[key], 1) for key in KEYS)]
        for each in found
        for name, own in each.systems.items()
    ]
    return markdown_table(["predicted", "median error", "nine of ten within", "median bias"], rows)


KEYS = ("median_error", "p90_error", "median_bias")


TORCH = {"torch float32": "PyTorch in f32", "torch bfloat16": "PyTorch in bf16"}


def runtimes(found: Sequence[Document]) -> str:
    rows = []
    for each in found:
        pets, fallbacks = each.systems["pets"], f"{each.settings['fallbacks']} of {each.settings['served']}"
        count = f"{each.settings['texts']} single texts of 5 to 500 tokens"
        sides = [each.systems[name] for name in TORCH]
        rows.append(
            [
                f"{each.settings['backbone']}: {count}; {fallbacks} batches in fallbacks",
                milliseconds(pets["mean_seconds"]),
                *(ratio(side["pets_ratio"]) for side in sides),
            ]
        )
        for shape, own in pets["batches"].items():
            ratios = [ratio(side["batches"][shape]["pets_ratio"]) for side in sides]
            rows.append([shape.replace("x", " x "), milliseconds(own["seconds"]), *ratios])
    return markdown_table(["texts x tokens", "jpets, ms", *(f"/ {label}" for label in TORCH.values())], rows)
