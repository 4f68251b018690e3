"""``bench.py paging``: many more registered tasks than slots on the device (HMI sections 7.3 and 7.4)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from benches.engine.task_files import read_task, write_task
from benches.shared import (
    RandomBackbone,
    answers,
    console,
    engine_cache,
    interleave,
    paired_ratio,
    random_backbone,
    report,
)
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.report import TasksReport
from jpets.types import BackboneRef, Head, Query, Result, Task
from jpets.xla_flags import set_xla_flags

TRAFFIC = ("zipf", "uniform", "hot")
LABELS = 4
TOLERANCE = 0.05
"""Tolerance of logits: bf16, in programs for banks of other sizes."""


def write_tasks(folder: pathlib.Path, backbone: RandomBackbone, methods: Sequence[str], count: int) -> list[str]:
    """Ids of ``count`` tasks whose files are in ``folder``; files that are there already stay. The methods take turns,
    and all heads are of one class."""
    config, names = backbone.config, []
    ref = BackboneRef.of(backbone)
    for number in range(count):
        method = methods[number % len(methods)]
        name = f"{method}-{number}"
        names.append(name)
        path = folder / f"{name}.safetensors"
        if path.exists():
            continue
        rng = np.random.default_rng(number)
        delta = METHODS[method].init(rng, METHODS[method].usual, config, 0.02)
        kernel = rng.standard_normal((config.hidden_size, LABELS), np.float32) * 0.1
        head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(LABELS, np.float32)})
        task = Task(name, ref, (delta,), head, tuple(f"label-{label}" for label in range(LABELS)))
        write_task(task, path)
        if number % 500 == 499:
            console.log(f"{number + 1} task files")
    return names


def draw(traffic: str, tasks: int, hot: Sequence[int], count: int, rng: np.random.Generator) -> np.ndarray:
    """Task numbers of ``count`` queries: by Zipf's law with exponent 1, evenly over all, or evenly over ``hot``."""
    if traffic == "hot":
        return rng.choice(np.asarray(hot), count)
    weights = 1 / np.arange(1, tasks + 1) if traffic == "zipf" else np.ones(tasks)
    return rng.choice(tasks, count, p=weights / weights.sum())


@contextlib.contextmanager
def serving(
    backbone: RandomBackbone,
    folder: pathlib.Path,
    names: Sequence[str],
    methods: Sequence[str],
    rows: Sequence[int] = (32,),
    **settings: Any,
) -> Iterator[Engine]:
    """An engine that knows these tasks and has read none of them, with programs for so many queries of 32 tokens."""
    length = 32
    base = EngineSettings(
        background_compile=False, max_batch_tokens=32 * length, max_batch_rows=32, max_length=length, max_queue=65536
    )
    shapes = [read_task(folder / f"{name}.safetensors") for name in names[: len(methods)]]
    with engine_cache() as cache:
        engine = Engine(
            backbone,
            [],
            dataclasses.replace(base, **settings),
            reserve=shapes,
            cache_dir=cache,
            buckets=[Bucket(count * length, ((count, length),)) for count in rows],
        )
        with engine.start(lambda what, done, total: None):
            for name in names:
                engine.register_task(name, functools.partial(read_task, folder / f"{name}.safetensors"))
            yield engine


def paging(
    backbone: str = "minilm-l6",
    tasks: int = 10000,
    slots: int = 255,
    hot: int = 32,
    methods: str = "adapter,lora,bitfit",
    host_memory_gb: float = 6.0,
    queries: int = 1024,
    rounds: int = 5,
    folder: Annotated[pathlib.Path | None, typer.Option(help="task files are kept here; else a temporary one")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second with ``slots`` task slots a class, beside everything on the device, and few tasks alone."""
    set_xla_flags()
    model, each = random_backbone(backbone), methods.split(",")
    with contextlib.ExitStack() as stack:
        kept = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        names = write_tasks(kept, model, each, tasks)
        few = [int(n) for n in np.random.default_rng(3).choice(tasks, hot, replace=False)]
        make = functools.partial(serving, model, kept, methods=each)
        engines = {
            "resident": stack.enter_context(make(names=names, slots=tasks // len(each) + 1)),
            "paged": stack.enter_context(make(names=names, slots=slots, host_memory_gb=host_memory_gb)),
            "eager": stack.enter_context(make(names=names, slots=slots, host_memory_gb=host_memory_gb, prefetch=False)),
            "few": stack.enter_context(make(names=[*names[: len(each)], *(names[n] for n in few)], slots=slots)),
        }
        for name in ("resident", "paged", "eager"):
            touch(engines[name], names, name)
        figures: dict[str, Any] = {}
        for traffic in TRAFFIC:
            figures |= _measure(traffic, engines, names, few, queries, rounds)
    settings = {
        "backbone": backbone,
        "tasks": tasks,
        "slots": slots,
        "hot": hot,
        "methods": methods,
        "host_memory_gb": host_memory_gb,
        "queries": queries,
        "rounds": rounds,
        "most_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    report("paging", settings, figures, json_out)


def touch(engine: Engine, names: Sequence[str], label: str) -> None:
    """Asks every task once, so that host memory and slots are as full as they can be."""
    for first in range(0, len(names), 1000):
        results = answers(engine, [Query(name, input_ids=[101, 7592, 102]) for name in names[first : first + 1000]])
        console.log(f"{label}: {first + len(results)} tasks asked, {dict(_tasks(engine).brought)}")


def _measure(
    traffic: str,
    engines: dict[str, Engine],
    names: Sequence[str],
    few: Sequence[int],
    queries: int,
    rounds: int,
) -> dict[str, Any]:
    systems = {
        "zipf": ("resident", "paged", "eager"),
        "uniform": ("resident", "paged", "eager"),
        "hot": ("few", "paged"),
    }
    ids = list(range(1000, 1032))
    asked: dict[str, list[Sequence[Query]]] = {name: [] for name in systems[traffic]}
    for round_number in range(rounds + 1):
        drawn = draw(traffic, len(names), few, queries, np.random.default_rng(round_number))
        for name in asked:
            asked[name].append([Query(names[n], input_ids=ids) for n in drawn])
    last: dict[str, list[Result]] = {}

    def run(name: str) -> None:
        last[name] = engines[name].infer(asked[name].pop())

    before = {name: _tasks(engines[name]) for name in asked}
    runs: dict[str, Callable[[], object]] = {name: functools.partial(run, name) for name in asked}
    seconds = interleave(runs, rounds)
    _compare(*last.values())
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        old, new = before[name], _tasks(engines[name])
        brought = {tier: new.brought[tier] - old.brought[tier] for tier in new.brought}
        figures[f"{traffic}/{name}"] = {
            "qps": queries / statistics.median(times),
            "seconds": statistics.median(times),
            "brought": sum(brought.values()) / (rounds + 1),
            "read": brought["repository"] / (rounds + 1),
            "evicted": (new.evicted - old.evicted) / (rounds + 1),
            "host_bytes": new.host_bytes,
        }
        base = systems[traffic][0]
        if name != base:
            figures[f"{traffic}/{name}"][f"over_{base}"] = paired_ratio(times, seconds[base])
    return figures


def _tasks(engine: Engine) -> TasksReport:
    (device,) = engine.report().devices
    return device.tasks


def _compare(*answers: Sequence[Result]) -> None:
    """Raises ``AssertionError`` unless every system gave every query the same answer."""
    for results in zip(*answers, strict=True):
        first = results[0]
        for other in results:
            assert other.error is None, other.error
            np.testing.assert_allclose(other.logits, first.logits, atol=TOLERANCE)
