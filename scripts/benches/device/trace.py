"""``bench.py trace``: the kernels of one macro-batch by their time on the device, as the profiler sees them."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import typer

from benches.engine.throughput import running_engine, task_queries
from benches.shared import answers, interleave, random_backbone, random_tasks, report
from jpets.types import Query
from jpets.xla_flags import set_xla_flags

GROUPS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile("sdpa|flash"),
    "kernels of our own": re.compile("mosaic"),
    "products": re.compile("nvjet|gemm|cutlass|xmma"),
    "copies": re.compile("memcpy|memset", re.IGNORECASE),
}
"""By the names that libraries and XLA give kernels; what none of them fits is element-wise work of XLA's own."""
ELEMENTWISE = "element-wise"
LONGEST = 12
"""Kernels that are listed by name."""


class Kernel(NamedTuple):
    """A kernel's run: its start and its time, in seconds."""

    name: str
    start: float
    seconds: float


def kernels_of(trace: bytes) -> list[Kernel]:
    """What a GPU's compute streams ran, from a ``trace.json.gz`` of JAX's profiler; none for a CPU."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    places = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if str(e.get("name")).endswith("_name")}
    devices = {pid for (pid, _), name in places.items() if "/device:GPU" in name}
    return [
        Kernel(e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e.get("ph") == "X" and e["pid"] in devices and "Compute" in places.get((e["pid"], e["tid"]), "")
    ]


def figures_of(kernels: Sequence[Kernel], batches: int) -> dict[str, Any]:
    """Device seconds of a batch: in all, by group, and of the kernels that take longest."""
    groups: dict[str, float] = {}
    names: dict[str, float] = {}
    for kernel in kernels:
        name, group = re.sub(r"_\d+$", "", kernel.name), group_of(kernel.name)
        groups[group] = groups.get(group, 0.0) + kernel.seconds / batches
        names[name] = names.get(name, 0.0) + kernel.seconds / batches
    return {
        "device_seconds": sum(groups.values()),
        "kernels": round(len(kernels) / batches),
        "groups": _by_time(groups),
        "longest": dict(list(_by_time(names).items())[:LONGEST]),
    }


def _by_time(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def group_of(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if pattern.search(kernel)), ELEMENTWISE)


def traced(run: Callable[[], object], batches: int) -> bytes:
    """The profiler's trace of so many batches."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(batches):
                run()
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        return path.read_bytes()


def trace(
    backbone: str = "bert-base",
    tasks: int = 128,
    length: int = 128,
    methods: str = "adapter,lora,bitfit,mask,diff,ia3,onebit,prefix,prompt",
    rounds: int = 15,
    batches: Annotated[int, typer.Option(help="batches in the trace")] = 3,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Device time of a batch of all tasks, and of the bare backbone, by kind of kernel. A CPU has wall time alone."""
    set_xla_flags()
    loaded = random_backbone(backbone)
    made = random_tasks(loaded, methods.split(","), tasks)
    ids = list(range(1000, 1000 + length))
    mixed = task_queries(made, [ids] * tasks)
    bare = [Query(None, input_ids=ids)] * tasks
    with running_engine(loaded, made, mixed, [length] * tasks, 0.0) as engine:
        engine.specialise(bare)
        systems = {"pets": lambda: answers(engine, mixed), "backbone": lambda: answers(engine, bare)}
        seconds = interleave(systems, rounds)
        figures: dict[str, dict[str, Any]] = {}
        for name, run in systems.items():
            figures[name] = {"seconds": statistics.median(seconds[name])}
            figures[name] |= figures_of(kernels_of(traced(run, batches)), batches)
    settings = {"backbone": backbone, "tasks": tasks, "length": length, "methods": methods, "rounds": rounds}
    report("trace", settings | {"batches": batches}, figures, json_out)
