"""Benchmarks: ``python scripts/bench.py NAME [options] --json OUT``.

Systems that are compared run interleaved in one process, warm; rates are medians, and a ratio comes with the 95 %
interval of the median of the paired ratios (bootstrap).
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from bench_batching import batching
from bench_capacity import capacity, memory
from bench_operators import operators
from bench_prediction import prediction
from bench_serving import serving
from bench_tenants import tenants
from benching import (
    console,
    draw_lengths,
    interleave,
    paired_ratio,
    random_backbone,
    random_tasks,
    report,
)
from merged_copies import MergedCopies
from served import serve

from jpets.config import EngineSettings
from jpets.deltas import task_lead
from jpets.engine.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.xla_flags import set_xla_flags
from jpets.types import Query

app = typer.Typer(add_completion=False, help=__doc__)
for command in (batching, capacity, memory, operators, prediction, serving, tenants):
    app.command()(command)


def fitting_bucket(lengths: Sequence[int]) -> Bucket:
    """A bucket for batches like this one: rectangular for equal lengths; else the tokens rounded up to a multiple of
    64 and the split into two or three groups (multiples of 8) whose attention is cheapest."""
    ordered = np.sort(lengths)
    if ordered[0] == ordered[-1]:
        return Bucket(len(lengths) * int(ordered[0]), ((len(lengths), int(ordered[0])),))
    tokens = -(-int(ordered.sum()) // 64) * 64
    ceil8 = -(-ordered // 8) * 8
    options: dict[tuple[tuple[int, int], ...], int] = {}
    n = len(ordered)
    for first in range(1, n):
        groups: dict[int, int] = {}
        for start, end in ((0, first), (first, n)):
            groups[int(ceil8[end - 1])] = groups.get(int(ceil8[end - 1]), 0) + end - start
        shape = tuple((count, length) for length, count in sorted(groups.items()))
        options[shape] = sum(count * length**2 for count, length in shape)
    return Bucket(tokens, min(options, key=lambda shape: options[shape]))


@app.command()
def throughput(
    backbone: str = "bert-base",
    init: str = "random",
    tasks: int = 32,
    per_task_batch: int = 1,
    length: int = 32,
    length_std: float = 0.0,
    methods: str = "adapter,lora,bitfit,mask,diff",
    systems: str = "pets,seqs,backbone",
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of one macro-batch of all tasks, of merged copies (in turn, at once, stacked), and bare."""
    if init != "random":
        raise typer.BadParameter("only randomly initialised backbones are benchmarked")
    set_xla_flags()
    loaded = random_backbone(backbone)
    made = random_tasks(loaded, methods.split(","), tasks)
    count = tasks * per_task_batch
    lengths = draw_lengths(count, length, length_std, loaded.config.max_positions)
    bucket = fitting_bucket(lengths)
    ids = [list(range(1000, 1000 + n)) for n in lengths]
    owners = [made[i // per_task_batch] for i in range(count)]  # a prompt takes the places of some of its text
    mixed = [Query(own.id, input_ids=row[task_lead(own).tokens :]) for own, row in zip(owners, ids, strict=True)]
    bare = [Query(None, input_ids=tokens) for tokens in ids]
    settings = EngineSettings(
        background_compile=False, max_batch_tokens=bucket.tokens, max_batch_rows=count, slots=tasks
    )
    with tempfile.TemporaryDirectory() as cache:
        engine = Engine(loaded, made, settings, cache_dir=pathlib.Path(cache), buckets=[bucket])
        engine.start(lambda what, done, total: console.log(f"{what} {done}/{total}"))
        engine.specialise(mixed)
        engine.specialise(bare)
        known: dict[str, Callable[[], object]] = {
            "pets": lambda: engine.infer(mixed),
            "backbone": lambda: engine.infer(bare),
        }
        chosen = systems.split(",")
        if {"seqs", "pars", "stacked"} & set(chosen):
            copies = MergedCopies(loaded, made, per_task_batch, lengths)
            known |= {"seqs": copies.in_turn, "pars": copies.concurrently}
            if "stacked" in chosen:
                known["stacked"] = copies.stacked()
        seconds = interleave({name: known[name] for name in chosen}, rounds)
        engine.close()
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        figures[name] = {"qps": count / statistics.median(times), "seconds": statistics.median(times)}
        if name != "pets" and "pets" in seconds:
            figures[name]["pets_ratio"] = paired_ratio(seconds["pets"], times)
    report(
        "throughput",
        {
            "backbone": backbone,
            "init": init,
            "tasks": tasks,
            "per_task_batch": per_task_batch,
            "length": length,
            "length_std": length_std,
            "methods": methods,
            "rounds": rounds,
            "bucket": str(bucket),
        },
        figures,
        json_out,
    )


@app.command()
def startup(rounds: int = 5, json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None) -> None:
    """Seconds from process start to ready of the served demo, with an empty cache and with a warm one."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    resident = 0.0
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for state in seconds:
                console.log(f"round {number + 1} of {rounds}: {state}")
                with serve(["--demo", "--cache-dir", cache]) as server:
                    seconds[state].append(server.seconds_to_ready)
                    resident = max(resident, server.metrics()["process_resident_memory_bytes"])
    figures = {state: {"seconds": statistics.median(times), "worst": max(times)} for state, times in seconds.items()}
    report("startup", {"rounds": rounds, "resident_bytes": resident}, figures, json_out)


if __name__ == "__main__":
    app()
