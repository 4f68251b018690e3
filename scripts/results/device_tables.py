"""Tables of what was measured on a GPU: kernels, trials, traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from results.documents import RESULTS, Document
from results.markdown import MISSING, markdown_table, percent

KERNEL_TESTS = "kernel-tests*.json"


def trace(found: Sequence[Document]) -> str:
    """A batch of all tasks beside the bare backbone."""
    parts = []
    for each in found:
        shape = f"{each.settings['tasks']} tasks x {each.settings['length']} tokens, {each.settings['methods']}"
        own, bare = each.systems["pets"], each.systems["backbone"]
        groups = list(dict.fromkeys([*own["groups"], *bare["groups"]]))
        rows = [
            ["one batch, on the host's clock", _ms(own.get("seconds")), _ms(bare.get("seconds")), MISSING],
            ["on the device", _ms(own["device_seconds"]), _ms(bare["device_seconds"]), "100 %"],
            *(
                [
                    group,
                    _ms(own["groups"].get(group)),
                    _ms(bare["groups"].get(group)),
                    percent(own["groups"].get(group, 0.0) / own["device_seconds"]),
                ]
                for group in groups
            ),
            ["kernels", str(own["kernels"]), str(bare["kernels"]), MISSING],
        ]
        named = f"{each.machine['device']}, {each.settings['backbone']}, {shape}{_note(each)}:"
        parts.append(f"{named}\n\n{markdown_table(['part', 'ms', 'ms of the backbone', 'share'], rows)}")
    return "\n\n".join(parts)


def traffic(found: Sequence[Document]) -> str:
    """The least time of a batch by its bytes and its arithmetic, with several choices of candidates."""
    rows = []
    for each in found:
        for system in ("pets", "backbone"):
            own, layers = each.systems[system], each.settings["layers"]
            rows.append(
                (
                    f"{each.settings['tasks']} x {each.settings['length']}",
                    "the backbone" if system == "backbone" else each.settings["candidates"].replace(",", ", "),
                    str(own["kernels"]),
                    f"{own['bytes'] / 1e9 / layers:.2f}",
                    f"{own['flops'] / 1e12 / layers:.3f}",
                    f"{own['least_ms'] / layers:.2f}",
                )
            )
    head = ["tasks x tokens", "candidates", "kernels in all", "GB a layer", "TFLOP a layer", "least ms a layer"]
    return markdown_table(head, list(dict.fromkeys(rows)), left=2)  # the backbone's is the same each time


def _note(document: Document) -> str:
    return f" ({document.settings['note']})" if "note" in document.settings else ""


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{1e3 * seconds:.2f}"


def kernels(found: Sequence[Document]) -> str:
    """Every candidate of every operator at one shape."""
    return _outcomes(found, "reference_ratio", "error")


def choice(found: Sequence[Document]) -> str:
    """The trials of a first start."""
    return _outcomes(found, "ratio", "out")


def _outcomes(found: Sequence[Document], ratio: str, out: str) -> str:
    parts = []
    for each in found:
        rows = [
            [name, _call_ms(own), f"{own[ratio]:.2f}" if own.get(ratio) else MISSING, str(own.get(out, MISSING))]
            for name, own in each.systems.items()
            if name != "trials"
        ]
        head = f"{each.machine['device']}, {each.settings['tasks']} tasks x {each.settings['length']} tokens"
        table = markdown_table(["operator, shape: candidate", "ms", "x the reference", "out because"], rows)
        parts.append(f"{head}:\n\n{table}")
    return "\n\n".join(parts)


def _call_ms(own: Mapping[str, Any]) -> str:
    if "ms" in own:
        return f"{own['ms']:.3f}"
    return f"{1e3 * own['seconds']:.3f}" if own.get("seconds") else MISSING


def kernel_tests() -> str:
    """The last line of the kernel tests on each device."""
    rows = [
        [path.parent.name, json.loads(path.read_text())["summary"]]
        for path in sorted(RESULTS.glob(f"*/{KERNEL_TESTS}"))
    ]
    return markdown_table(["device", "kernel tests"], rows, left=2)
