"""``bench prediction``: the cost profile's predictions for random batches beside their measured times."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
import typer

from benches.scheduling.batching import read_profile
from benches.scheduling.plan_runner import PlanRunner
from benches.shared import console, random_backbone, random_tasks, report
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.rows import Row
from jpets.engine.costs.cost_table import full_rows
from jpets.engine.programs.program import Program, ProgramKey, compile_programs
from jpets.scheduling.costs.policy_lookup import Costs, Limits
from jpets.scheduling.queue import Batch, Queue
from jpets.xla_flags import set_xla_flags

SHAPES = (
    Bucket(128, ((4, 32),)),
    Bucket(512, ((8, 64),)),
    Bucket(512, ((16, 32),)),
    Bucket(1024, ((32, 32),)),
    Bucket(1024, ((8, 128),)),
    Bucket(256, ((8, 32), (4, 64))),
    Bucket(512, ((16, 32), (8, 64), (1, 128))),
    Bucket(1024, ((32, 32), (16, 64), (2, 128))),
    Bucket(2048, ((48, 32), (32, 64))),
)


REFERENCE = Bucket(1024, ((32, 32),))
"""A shape of the profile that is timed again among the batches: it shows how the machine's speed changed in between."""
BESIDE = 5
"""Batches between two of them."""


def draw_batch(bucket: Bucket, rng: np.random.Generator) -> list[int]:
    """Random lengths that fit a batch, until ten in a row did not."""
    lengths: list[int] = []
    misses = 0
    while misses < 10:
        longest = bucket.groups[int(rng.integers(len(bucket.groups)))][1]
        length = int(rng.integers(3, longest + 1))
        if bucket.holds(np.array([*lengths, length])):
            lengths.append(length)
        else:
            misses += 1
    return lengths


def prediction(
    backbone: str = "minilm-l6",
    batches: int = 200,
    tasks: int = 32,
    methods: str = "adapter,lora,bitfit,mask,diff",
    rounds: int = 5,
    clock: Annotated[
        str, typer.Option(help="wall, or processor: what this process takes, whatever else the machine does (CPU only)")
    ] = "wall",
    profile: Annotated[pathlib.Path | None, typer.Option(help="cost profile to read, or to write")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Relative error of predicted batch times; the batches run interleaved, the median of the rounds counts.

    A bare batch runs among them, often: ``drift`` is its time over that of the profile, and how much the machine's
    speed changed meanwhile. Without drift, each run counts as its ratio to the bare batches next to it.
    """
    now = {"wall": time.perf_counter, "processor": time.process_time}[clock]
    set_xla_flags()
    loaded = random_backbone(backbone)
    runner = PlanRunner(loaded, random_tasks(loaded, methods.split(","), tasks))
    kinds = sorted(set(runner.kinds))
    rng = np.random.default_rng(3)
    lengths: list[int] = []
    plan: list[Batch] = []
    for number in range(batches):
        bucket = SHAPES[number % len(SHAPES)]
        own = draw_batch(bucket, rng)
        plan.append(Batch(np.arange(len(lengths), len(lengths) + len(own)), bucket.tokens, bucket.groups))
        lengths += own
    chosen = rng.integers(0, tasks, len(lengths))
    queue = Queue.of(lengths, chosen, [kinds.index(runner.kinds[task]) for task in chosen])
    measured_profile = read_profile(profile, runner, 2048, now)
    costs = Costs(measured_profile, Limits(128, 4096, 128), kinds)
    rows = runner.rows(lengths, chosen.tolist())
    steps = runner.prepare(plan, rows)
    (reference,) = compile_programs(runner.family, [ProgramKey(REFERENCE, Variant())])
    console.log("compiled")

    def run(program: Program, members: Sequence[Row]) -> float:
        assembled = runner.replica.assemble(members, program)
        start = now()
        jax.block_until_ready(runner.replica.dispatch(program, assembled))
        return now() - start

    bare = full_rows(REFERENCE, runner.family.network)
    times = np.empty((rounds, len(steps)))
    beside = np.empty((rounds, -(-len(steps) // BESIDE)))
    for number in range(-1, rounds):  # one to warm up
        for at, (program, members) in enumerate(steps):
            if at % BESIDE == 0:
                beside[number, at // BESIDE] = run(reference, bare)
            times[number, at] = run(program, members)
    measured = np.median(times, axis=0)
    ((n, length),) = REFERENCE.groups
    expected = float(measured_profile.alpha.at([n], [length])[0, 0])
    drift = float(np.median(beside)) / expected
    around = (beside + np.roll(beside, -1, axis=1)) / 2  # before it and after it
    relative = np.median(times / np.repeat(around, BESIDE, axis=1)[:, : len(steps)], axis=0)
    predicted = np.array([costs.total(queue, [batch]) for batch in plan])
    ratios, without = predicted / measured, predicted / expected / relative
    figures = {
        "median_error": float(np.median(np.abs(ratios - 1))),
        "p90_error": float(np.percentile(np.abs(ratios - 1), 90)),
        "median_bias": float(np.median(ratios - 1)),
        "drift": drift,
        "median_error_without_drift": float(np.median(np.abs(without - 1))),
        "median_bias_without_drift": float(np.median(without - 1)),
        "measured_seconds": measured.tolist(),
        "predicted_seconds": predicted.tolist(),
    }
    settings = {
        "backbone": backbone,
        "batches": batches,
        "tasks": tasks,
        "methods": methods,
        "rounds": rounds,
        "clock": clock,
    }
    report("prediction", settings, {"pets": figures}, json_out)
