"""``bench prediction``: the cost profile's predictions for random batches beside their measured times."""

from __future__ import annotations

import pathlib
import statistics
import time
from typing import Annotated

import jax
import numpy as np
import typer

from benches.scheduling.batching import read_profile
from benches.scheduling.plan_runner import PlanRunner
from benches.shared import console, random_backbone, random_tasks, report
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.costs.cost_table import full_rows
from jpets.engine.programs.program import ProgramKey, compile_programs
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
    profile: Annotated[pathlib.Path | None, typer.Option(help="cost profile to read, or to write")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Relative error of predicted batch times; the batches run interleaved, the median of the rounds counts.

    ``drift`` is the time of a bare batch among them over its time when the profile was measured.
    """
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
    measured_profile = read_profile(profile, runner, 2048)
    costs = Costs(measured_profile, Limits(128, 4096, 128), kinds)
    rows = runner.rows(lengths, chosen.tolist())
    steps = runner.prepare(plan, rows)
    (reference,) = compile_programs(runner.family, [ProgramKey(REFERENCE, Variant())])
    steps.append((reference, full_rows(REFERENCE, runner.family.network)))
    console.log("compiled")
    times: list[list[float]] = [[] for _ in steps]
    for round_number in range(rounds + 1):
        for (program, members), seconds in zip(steps, times, strict=True):
            assembled = runner.replica.assemble(members, program)
            start = time.perf_counter()
            jax.block_until_ready(runner.replica.dispatch(program, assembled))
            if round_number:
                seconds.append(time.perf_counter() - start)
    *measured, reference_seconds = (statistics.median(seconds) for seconds in times)
    ((n, length),) = REFERENCE.groups
    drift = reference_seconds / float(measured_profile.alpha.at([n], [length])[0, 0])
    predicted = np.array([costs.total(queue, [batch]) for batch in plan])
    ratios = predicted / np.array(measured)
    figures = {
        "median_error": float(np.median(np.abs(ratios - 1))),
        "p90_error": float(np.percentile(np.abs(ratios - 1), 90)),
        "median_bias": float(np.median(ratios - 1)),
        "drift": drift,
        "median_error_without_drift": float(np.median(np.abs(ratios * drift - 1))),
        "measured_seconds": measured,
        "predicted_seconds": predicted.tolist(),
    }
    settings = {"backbone": backbone, "batches": batches, "tasks": tasks, "methods": methods, "rounds": rounds}
    report("prediction", settings, {"pets": figures}, json_out)
