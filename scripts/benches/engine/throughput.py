"""``bench.py throughput``: one macro-batch of all tasks beside the usual alternatives (PetS figures 7 and 8)."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from benches.engine.merged_copies import MergedCopies
from benches.shared import (
    RandomBackbone,
    answers,
    console,
    draw_lengths,
    engine_cache,
    interleave,
    paired_ratio,
    random_backbone,
    random_tasks,
    report,
)
from jpets.config import EngineSettings
from jpets.deltas import METHODS, task_lead
from jpets.engine.batch.bucket import Bucket
from jpets.engine.costs.profile_measurement import measure_figures
from jpets.engine.engine import Engine
from jpets.types import Query, Task
from jpets.xla_flags import set_xla_flags

MERGE_PATIENCE = 30
"""The wait for merged copies ends after so many batches without a further one."""


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


def keep_profile(engine: Engine, max_tokens: int) -> None:
    """Measures the cost profile of an engine that is not started, for the next one with the same classes."""
    console.log("cost profile")
    figures = measure_figures(
        engine.family, engine.replica.mesh, max_tokens=max_tokens, progress=lambda what, done, total: None
    )
    engine.profile.add(figures)


def merge_hot_tasks(engine: Engine, queries: Sequence[Query]) -> None:
    """Sends the batch until no more tasks get merged copies."""
    before, still = -1, 0
    while still < MERGE_PATIENCE:
        answers(engine, queries)
        time.sleep(0.5)
        (device,) = engine.report().devices
        still = still + 1 if device.tasks.merged == before else 0
        before = device.tasks.merged
    console.log(f"{before} tasks merged")


def smaller_buckets(tasks: Sequence[Task], lengths: Sequence[int], each: int) -> list[Bucket]:
    """Shapes for one task's part of the batch, and for the rest without tasks that replace weights, or heavy ones."""
    methods = [[METHODS[delta.method] for delta in task.deltas] for task in tasks]
    replacing = sum(any(method.step == "weight" for method in own) for own in methods)
    heavy = sum(any(method.kind == "heavy" for method in own) for own in methods)
    rows = {1, len(tasks) - replacing, len(tasks) - heavy} - {len(tasks), 0}
    return [Bucket(each * n * max(lengths), ((each * n, max(lengths)),)) for n in sorted(rows)]


@contextlib.contextmanager
def running_engine(
    backbone: RandomBackbone, tasks: Sequence[Task], mixed: Sequence[Query], lengths: Sequence[int], merged_gb: float
) -> Iterator[Engine]:
    """An engine that has the best programs for ``mixed``, for the same texts without tasks, and, with ``merged_gb``,
    merged copies of hot tasks and programs for each task's own part of the batch."""
    bucket, each = fitting_bucket(lengths), len(mixed) // len(tasks)
    shapes = [bucket, *smaller_buckets(tasks, lengths, each)] if merged_gb else [bucket]
    settings = EngineSettings(
        background_compile=False,
        max_batch_tokens=bucket.tokens,
        max_batch_rows=len(mixed),
        slots=len(tasks),
        merged_memory_gb=merged_gb,
    )
    with engine_cache() as cache:

        def make() -> Engine:
            return Engine(backbone, tasks, settings, cache_dir=cache, buckets=shapes)

        if merged_gb:
            keep_profile(make(), bucket.tokens)
        with make().start(lambda what, done, total: console.log(f"{what} {done}/{total}")) as engine:
            engine.specialise(mixed)
            if merged_gb:
                for task in tasks:
                    engine.specialise([query for query in mixed if query.task == task.id])
                merge_hot_tasks(engine, mixed)
            yield engine


def _batches(engine: Engine, run: Callable[[], object]) -> int:
    """Batches of one run: tasks with merged copies are in batches of their own."""
    before = engine.report().devices[0].batches
    run()
    return engine.report().devices[0].batches - before


def task_queries(owners: Sequence[Task], ids: Sequence[list[int]]) -> list[Query]:
    """A query of each owner; a prompt takes the places of some of its text."""
    return [Query(own.id, input_ids=row[task_lead(own).tokens :]) for own, row in zip(owners, ids, strict=True)]


def throughput(
    backbone: str = "bert-base",
    init: str = "random",
    tasks: int = 32,
    per_task_batch: int = 1,
    length: int = 32,
    length_std: float = 0.0,
    methods: str = "adapter,lora,bitfit,mask,diff",
    systems: str = "pets,seqs,backbone",
    merged_gb: Annotated[float, typer.Option(help="device memory for merged weights of hot tasks")] = 0.0,
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of one macro-batch of all tasks, of merged copies (in turn, at once, stacked), and bare."""
    if init != "random":
        raise typer.BadParameter("only randomly initialised backbones are benchmarked")
    set_xla_flags()
    loaded, chosen = random_backbone(backbone), systems.split(",")
    made = random_tasks(loaded, methods.split(","), tasks)
    count = tasks * per_task_batch
    lengths = draw_lengths(count, length, length_std, loaded.config.max_positions)
    ids = [list(range(1000, 1000 + n)) for n in lengths]
    owners = [made[i // per_task_batch] for i in range(count)]
    mixed = task_queries(owners, ids)
    bare = [Query(None, input_ids=tokens) for tokens in ids]
    with running_engine(loaded, made, mixed, lengths, merged_gb) as engine:
        engine.specialise(bare)
        known: dict[str, Callable[[], object]] = {
            "pets": lambda: answers(engine, mixed),
            "backbone": lambda: answers(engine, bare),
        }
        if {"seqs", "pars", "stacked"} & set(chosen):
            copies = MergedCopies(loaded, made).batch(per_task_batch, lengths)
            known |= {"seqs": copies.in_turn, "pars": copies.concurrently}
            if "stacked" in chosen:
                known["stacked"] = copies.stacked()
        seconds = interleave({name: known[name] for name in chosen}, rounds)
        hot = engine.report().devices[0].tasks.merged
        batches = {name: _batches(engine, known[name]) for name in ("pets", "backbone") if name in chosen}
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        figures[name] = {"qps": count / statistics.median(times), "seconds": statistics.median(times)}
        if name in batches:
            figures[name]["batches"] = batches[name]
        if name != "pets" and "pets" in seconds:
            figures[name]["pets_ratio"] = paired_ratio(seconds["pets"], times)
    settings = {
        "backbone": backbone,
        "init": init,
        "tasks": tasks,
        "per_task_batch": per_task_batch,
        "length": length,
        "length_std": length_std,
        "methods": methods,
        "rounds": rounds,
        "bucket": str(fitting_bucket(lengths)),
        "merged_gb": merged_gb,
        "merged_tasks": hot,
    }
    report("throughput", settings, figures, json_out)
