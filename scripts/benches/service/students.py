"""``bench.py students``: groups of students beside their teachers, one text at a time, many at once, and under a trace
with bursts (Student Parallelism tables 2 and 4)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.service.bursty import Burst, Day
from benches.shared import (
    RandomBackbone,
    answers,
    console,
    draw_lengths,
    engine_cache,
    interleave,
    named_backbone,
    paired_ratio,
    report,
)
from jpets.config import BackboneConfig, EngineSettings, SizingRule
from jpets.deltas import METHODS
from jpets.engine.engine import Engine
from jpets.engine.students.serving import StudentServing
from jpets.errors import Saturated
from jpets.model.encoder import random_params
from jpets.students.session import STUDENT_METHOD, student_settings
from jpets.types import BackboneRef, Delta, Head, LoadedBackbone, Query, Students, Task
from jpets.xla_flags import set_xla_flags

LABELS = 4
STILL = 0.02
"""Seconds between looks."""
ALONE = 48
"""Texts of a round that come one by one."""
FEW, EACH_FEW = (2, 3, 5, 8), 8
"""Texts that come at once, as under a moderate load, and how often so many do before anything is timed."""
FEW_MISS = 0.05
"""Share of the batches that may miss their programs when timing begins."""
ALIKE = 3
"""Passes over the traffic in which no other students may have got weights of their own."""
STREAM_LOAD, STREAM_SECONDS = 0.5, 20.0
"""Rate of a stream of texts before anything is timed, as a part of what is reached of texts that come together."""
TARGET = 3.0
"""Times the mean response of an idle server within which 95 % of the answers are to come."""


def make_backbone(config: BackboneConfig, layers: int) -> RandomBackbone:
    own = dataclasses.replace(config, layers=layers)
    return RandomBackbone(f"layers-{layers}", own, jax.tree.map(np.asarray, random_params(own)))


def make_task(backbone: LoadedBackbone, name: str, students: int = 0) -> Task:
    """A group of students as they are trained by default, or a model of its own: the backbone with a head."""
    rng, config = np.random.default_rng(len(name)), backbone.config
    kernel = rng.standard_normal((config.hidden_size, LABELS), np.float32) * 0.02
    head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(LABELS, np.float32)}, pooling="mean")
    method = METHODS[STUDENT_METHOD]
    settings = {**method.usual, **student_settings(STUDENT_METHOD)}
    deltas: Sequence[Delta] = [method.init(rng, settings, config, 0.02) for _ in range(students)]
    group = Students((1.0,) * students) if students else None
    return Task(name, BackboneRef.of(backbone), tuple(deltas), head, tuple("abcd"), students=group)


@contextlib.contextmanager
def started(
    backbone: LoadedBackbone,
    tasks: Sequence[Task],
    queries: Sequence[Sequence[Query]],
    cache: Any,
    seconds: float,
    idle: float,
    merged_gb: float = 0.0,
    traffic: Callable[[StudentServing], None] = lambda serving: None,
) -> Iterator[tuple[StudentServing, Mapping[str, float]]]:
    """Whole groups as they are served, after traffic like this until hardly a batch of it misses its program and the
    same students have merged weights for a while, or for so many seconds, then other ``traffic``, and after at most
    ``idle`` seconds with nothing to do, in which programs become one function. Then nothing is compiled any more, as it
    would take cores from the other systems. Yields the server, and what became of the traffic."""
    slots = max(32, sum(len(task.parts) for task in tasks))
    settings = EngineSettings(slots=slots, merged_memory_gb=merged_gb)
    shapes = [part for task in tasks for part in task.parts]
    engine = Engine(backbone, (), settings, reserve=shapes, cache_dir=cache)
    with StudentServing(engine, SizingRule(fixed=True)).start() as serving:
        for task in tasks:
            serving.add_task(task)
        began, missed, merged = time.monotonic(), 1.0, list[int]()
        while time.monotonic() < began + seconds:
            missed = _missed(engine, lambda: [answers(serving, some) for some in queries])
            merged.append(_merged(engine))
            if missed <= FEW_MISS and merged[-ALIKE:] == [merged[-1]] * ALIKE:
                break
        traffic(serving)
        missed = _missed(engine, lambda: [answers(serving, some) for some in queries])
        served = time.monotonic()
        while engine.compiler.waiting and time.monotonic() < served + idle:
            time.sleep(STILL)
        engine.compiler.close()
        told = {
            "warm_up_seconds": served - began,
            "idle_seconds": time.monotonic() - served,
            "fallback_share": missed,
            "programs": len(engine.replica.programs),
            "in_parts": sum(program.chained for program in engine.replica.programs),
            "merged": _merged(engine),
        }
        console.log(backbone.name, told)
        yield serving, told


def _merged(engine: Engine) -> int:
    """The students with weights of their own."""
    (device,) = engine.report().devices
    return device.tasks.merged


def _missed(engine: Engine, run: Callable[[], object]) -> float:
    """The share of the batches meanwhile that miss their programs."""
    before = engine.report().devices[0]
    run()
    after = engine.report().devices[0]
    return (after.fallbacks - before.fallbacks) / (after.batches - before.batches)


def batches(tasks: Sequence[str], ids: Sequence[list[int]]) -> list[list[Query]]:
    """Texts of each task: some one by one, some a few at a time, then all at once."""
    rng = np.random.default_rng(0)
    few = [rng.choice(len(ids), count) for count in FEW for _ in range(EACH_FEW)]
    return [
        *([Query(task, input_ids=own)] for own in ids[:ALONE] for task in tasks),
        *([Query(task, input_ids=ids[at]) for at in some] for some in few for task in tasks),
        *([Query(task, input_ids=own) for own in ids] for task in tasks),
    ]


def students(
    backbone: str = "minilm-l6",
    depths: Annotated[str, typer.Option(help="layers of the teachers")] = "6,12",
    layers: Annotated[int, typer.Option(help="layers of a student")] = 2,
    most: Annotated[int, typer.Option(help="students of a group")] = 3,
    groups: Annotated[int, typer.Option(help="groups whose queries are batched together")] = 32,
    length: int = 32,
    length_std: float = 8.0,
    queries: int = 256,
    rounds: int = 9,
    merged_gb: Annotated[float, typer.Option(help="device memory for merged weights of hot students")] = 0.25,
    warm_up: Annotated[float, typer.Option(help="most seconds of traffic before, of each system")] = 480.0,
    idle: Annotated[float, typer.Option(help="most seconds to wait for programs then, of each system")] = 120.0,
    day: Annotated[float, typer.Option(help="seconds of the trace; 0: none")] = 90.0,
    load: Annotated[float, typer.Option(help="mean rate, as a part of what whole groups reach")] = 0.3,
    burst: Annotated[float, typer.Option(help="times that rate in a burst")] = 5.0,
    window: Annotated[float, typer.Option(help="quiet seconds until one student more answers")] = 5.0,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Response times of one text at a time, rates of many, groups of many tasks together and one after the other, and
    the responses under a day with bursts: groups whose size follows the load beside whole ones."""
    set_xla_flags()
    config = named_backbone(backbone)
    lengths = draw_lengths(queries, length, length_std, config.max_positions)
    rng = np.random.default_rng(2)
    ids = [rng.integers(1000, config.vocab_size, n).tolist() for n in lengths]
    with contextlib.ExitStack() as stack:
        systems: dict[str, tuple[StudentServing, Sequence[str]]] = {}
        before: dict[str, Mapping[str, float]] = {}
        for depth in [int(each) for each in depths.split(",")]:
            own = make_backbone(config, depth)
            task = make_task(own, "teacher")
            asked = batches([task.id], ids)
            stream = partial(_stream, tasks=[task.id], ids=ids)
            engine, before[own.name] = stack.enter_context(
                started(own, [task], asked, stack.enter_context(engine_cache()), warm_up, idle, traffic=stream)
            )
            systems[f"teacher of {depth} layers"] = engine, [task.id]
        small = make_backbone(config, layers)
        sizes = [make_task(small, f"group-of-{size}", size) for size in range(1, most + 1)]
        many = [make_task(small, f"one-of-{number}", most) for number in range(groups)]
        asked = batches([task.id for task in sizes], ids)
        asked += [[Query(task.id, input_ids=ids[at % len(ids)]) for at, task in enumerate(many)]]
        stream = partial(_stream, tasks=[task.id for task in sizes], ids=ids)
        serving, before[small.name] = stack.enter_context(
            started(
                small, [*sizes, *many], asked, stack.enter_context(engine_cache()), warm_up, idle, merged_gb, stream
            )
        )
        for size, task in enumerate(sizes, 1):
            systems[f"{size} student" + "s" * (size > 1)] = serving, [task.id]
        found = _alone(systems, ids, rounds)
        _rates(systems, ids, rounds, found)
        found["many groups"] = _together(serving, [task.id for task in many], ids, rounds)
        if day:
            found |= _day(serving, sizes[-1], ids, found, Day(day, 0.0), load, burst, SizingRule(window=window))
    settings = {
        "backbone": backbone, "depths": depths, "layers": layers, "most": most, "groups": groups, "length": length,
        "length_std": length_std, "queries": queries, "rounds": rounds, "merged_gb": merged_gb,
        "warm_up": warm_up, "idle": idle, "day": day, "load": load, "burst": burst, "window": window,
        "before": before,
    }  # fmt: skip
    report("students", settings, found, json_out)


def _stream(serving: StudentServing, tasks: Sequence[str], ids: Sequence[list[int]]) -> None:
    """Texts that come one by one, faster than they are answered one by one: batches of a stream are others than those
    of texts that come together."""
    for task in tasks:
        began = time.perf_counter()
        answers(serving, [Query(task, input_ids=own) for own in ids])
        rate = STREAM_LOAD * len(ids) / (time.perf_counter() - began)
        _play(serving, task, ids, Day(STREAM_SECONDS, rate).arrivals(1))


Systems = dict[str, tuple[StudentServing, Sequence[str]]]


def _alone(systems: Systems, ids: Sequence[list[int]], rounds: int) -> dict[str, dict[str, Any]]:
    """Mean and 95th percentile of one text at a time, in ms; ratios to each teacher."""
    few = ids[:ALONE]
    each: dict[str, list[list[float]]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, (engine, (task,)) in systems.items():
            took = []
            for own in few:
                began = time.perf_counter()
                answers(engine, [Query(task, input_ids=own)])
                took.append(time.perf_counter() - began)
            each[name].append(took)
    means = {name: [float(np.mean(took)) for took in own] for name, own in each.items()}
    teachers = [name for name in systems if name.startswith("teacher")]
    return {
        name: {
            "mean_ms": 1000 * float(np.median(means[name])),
            "p95_ms": 1000 * float(np.percentile(np.concatenate(own), 95)),
            **{f"of {teacher}": paired_ratio(means[teacher], means[name]) for teacher in teachers if teacher != name},
        }
        for name, own in each.items()
    }


def _rates(systems: Systems, ids: Sequence[list[int]], rounds: int, found: dict[str, dict[str, Any]]) -> None:
    """Queries a second where all come at once, and the ratios to each teacher's."""
    runs: dict[str, Callable[[], object]] = {
        name: lambda engine=engine, task=task: answers(engine, [Query(task, input_ids=own) for own in ids])  # type: ignore[misc]
        for name, (engine, (task,)) in systems.items()
    }
    seconds = interleave(runs, rounds)
    for name, took in seconds.items():
        found[name]["qps"] = len(ids) / float(np.median(took))
        for teacher in systems:
            if teacher.startswith("teacher") and teacher != name:
                found[name][f"rate / {teacher}"] = paired_ratio(took, seconds[teacher])


def _together(serving: StudentServing, tasks: Sequence[str], ids: Sequence[list[int]], rounds: int) -> dict[str, Any]:
    """One query of each group at once, beside the groups one after the other."""
    queries = [Query(task, input_ids=ids[at % len(ids)]) for at, task in enumerate(tasks)]
    seconds = interleave(
        {
            "together": lambda: answers(serving, queries),
            "one by one": lambda: [answers(serving, [query]) for query in queries],
        },
        rounds,
    )
    return {
        "qps": len(queries) / float(np.median(seconds["together"])),
        "rate / one by one": paired_ratio(seconds["together"], seconds["one by one"]),
    }


def _day(
    serving: StudentServing,
    task: Task,
    ids: Sequence[list[int]],
    found: dict[str, dict[str, Any]],
    day: Day,
    load: float,
    times: float,
    follows: SizingRule,
) -> dict[str, dict[str, Any]]:
    """The same day for groups that follow the load and for whole ones."""
    name = f"{len(task.parts)} students"
    bursts = tuple(Burst(part * day.seconds, 0.08 * day.seconds, times) for part in (0.3, 0.6))
    day = dataclasses.replace(day, rate=load * found[name]["qps"], bursts=bursts)
    arrivals = day.arrivals(0)
    target = TARGET * found[name]["mean_ms"]
    told = {}
    for rule, how in (("follows the load", follows), ("whole groups", SizingRule(fixed=True))):
        own = StudentServing(serving.engine, how)
        own.add_task(dataclasses.replace(task, id="day"))
        took, sizes = _play(own, "day", ids, arrivals)
        deadline = time.monotonic() + 20 * follows.window
        while own.size.dropped and time.monotonic() < deadline:
            time.sleep(STILL)
        inside = day.in_burst(arrivals)
        told[f"day, {rule}"] = {
            "queries": len(took),
            "refused": int(np.isinf(took).sum()),
            "target_ms": target,
            "p95_ms": 1000 * float(np.percentile(took, 95, method="higher")),
            "p95_in_bursts_ms": 1000 * float(np.percentile(took[inside], 95, method="higher")),
            "p95_between_ms": 1000 * float(np.percentile(took[~inside], 95, method="higher")),
            "in_target": float((1000 * took <= target).mean()),
            "students": float(np.nanmean(sizes)),
            "students_in_bursts": float(np.nanmean(sizes[inside])),
            "whole_again": own.size.dropped == 0,
            "together": own.size.together,
        }
        own.remove_task("day")
    return told


def _play(
    serving: StudentServing, task: str, ids: Sequence[list[int]], arrivals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds from when each query was to come until its answer, students that made it): infinite, and NaN, where the
    queue was full and refused it, or it failed."""
    took, sizes = np.full(len(arrivals), np.inf), np.full(len(arrivals), np.nan)
    futures = []
    began = time.perf_counter() + 0.1

    def answered(at: int, due: float) -> Callable[[Any], None]:
        def note(future: Any) -> None:
            result = future.result()
            if result.error is None:
                took[at], sizes[at] = time.perf_counter() - due, result.students or 0

        return note

    for at, offset in enumerate(arrivals):
        due = began + offset
        if (wait := due - time.perf_counter()) > 0:
            time.sleep(wait)
        try:
            (future,) = serving.submit([Query(task, input_ids=ids[at % len(ids)])])
        except Saturated:
            continue
        future.add_done_callback(answered(at, due))
        futures.append(future)
    concurrent.futures.wait(futures)
    time.sleep(STILL)  # callbacks come after the result
    return took, sizes
