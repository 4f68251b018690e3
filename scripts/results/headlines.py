"""The README's table: a few figures of one machine, each with the command that measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from results.documents import BenchCommand, Document, command
from results.markdown import markdown_table, ratio
from results.sustained import sustained

FILES = {
    "light": "cpu-2core/throughput-bert-base-light-32",
    "five": "cpu-2core/throughput-bert-base-five-32",
    "capacity": "cpu-2core/capacity-bert-base",
    "four": "cpu-2core/capacity-bert-base-pets-four",
    "served": "cpu-2core/batching-minilm-served",
    "serving": "cpu-2core/serving-gaussian",
    "startup": "cpu-2core/startup",
}
"""By line, the file of its figures."""


def headlines(documents: Sequence[Document], commands: Mapping[str, BenchCommand]) -> str:
    own = {line: next(each for each in documents if each.label == label) for line, label in FILES.items()}
    served = own["served"].systems["served auto"]
    light, five = own["light"].systems, own["five"].systems
    tasks = {name: f"{figures['tasks']:,}" for name, figures in own["capacity"].systems.items()}
    target = own["serving"].settings["target"]
    load = {n: f"{sustained(each['curve'], target).rate:.0f}" for n, each in own["serving"].systems.items()}
    start = {name: f"{figures['seconds']:.0f} s" for name, figures in own["startup"].systems.items()}
    found = {
        "light": (
            "BERT-base, 32 tasks of adapter, LoRA and BitFit in one batch: speed",
            f"{ratio(light['backbone']['pets_ratio'])} x the bare backbone, "
            f"{ratio(light['seqs']['pets_ratio'])} x merged copies in turn",
        ),
        "five": (
            "the same with mask and diff too",
            f"{ratio(five['backbone']['pets_ratio'])} x the backbone, {ratio(five['seqs']['pets_ratio'])} x merged "
            f"copies in turn, {ratio(five['stacked']['pets_ratio'])} x stacked ones",
        ),
        "capacity": (
            "BERT-base tasks that fit 32 GB",
            f"{tasks['mixed']} of these five methods, {own['four'].systems['mixed']['tasks']:,} of PetS's four, "
            f"{tasks['seqs']} merged copies",
        ),
        "served": (
            "MiniLM, 512 waiting queries of 32 tasks of adapter, BitFit, mask and diff: as served",
            f"{served['qps']:.0f} queries/s, {ratio(served['over_packed'])} x plans in programs of exactly their "
            f"shapes, {ratio(served['over_served_alpha'])} x PetS's alpha",
        ),
        "serving": (
            "texts a second over HTTP, p99 within 100 ms",
            f"{load['pets']}; {load['single']} without batching, {load['naive']} in padded batches",
        ),
        "startup": ("the demo's start", f"{start['cold']}; {start['warm']} with a warm cache"),
    }
    rows = [
        [what, figure, f"`{command(own[line], commands).removesuffix(' --json FILE')}`"]
        for line, (what, figure) in found.items()
    ]
    return markdown_table(["what", "figure", "command"], rows, left=3)
