"""``bench prediction``: predicted times of random batches beside measured ones: by the cost profile alone, and as an
engine predicts them, which learns from the batches before."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import jax
import numpy as np
import typer

from benches.scheduling.plan_runner import PlanRunner, PreparedBatch
from benches.shared import console, random_backbone, random_tasks, report
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row
from jpets.engine.compilation.readiness import COARSE_REPEATS
from jpets.engine.costs.coarse_profile import priced
from jpets.engine.costs.cost_table import CostTable, full_rows, measure
from jpets.engine.costs.figures import Figures, profile_of
from jpets.engine.costs.live_profile import LiveProfile
from jpets.engine.costs.profile_measurement import measure_figures
from jpets.engine.planning.predictions import Predictions
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


class Timed(NamedTuple):
    """Batches in their programs: seconds of every round [rounds, batches], and of the bare batches among them
    [rounds, batches / BESIDE]."""

    seconds: np.ndarray
    beside: np.ndarray

    @property
    def medians(self) -> np.ndarray:
        return np.median(self.seconds, axis=0)

    def over_bare(self) -> np.ndarray:
        """Each batch's time as its ratio to the bare batches next to it [batches]."""
        one_after_the_other = self.beside.ravel()
        after = np.append(one_after_the_other[1:], one_after_the_other[-1]).reshape(self.beside.shape)
        around = (self.beside + after) / 2
        return np.median(self.seconds / np.repeat(around, BESIDE, axis=1)[:, : self.seconds.shape[1]], axis=0)


def prediction(
    backbone: str = "minilm-l6",
    batches: int = 200,
    tasks: int = 32,
    methods: str = "adapter,lora,bitfit,mask,diff",
    rounds: int = 5,
    passes: Annotated[int, typer.Option(help="over as many other batches, from which the engine's part learns")] = 5,
    profile: Annotated[
        pathlib.Path | None, typer.Option(help="figures of the cost profile to read, or to write")
    ] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Relative error of predicted batch times; the batches run interleaved, the median of the rounds counts.

    ``profile``: the measured cost profile alone. A bare batch runs among the others, often: ``drift`` is its time over
    that of the profile, and how much the machine's speed changed meanwhile. Without drift, each run counts as its ratio
    to the bare batches next to it. ``engine``: ``Predictions`` of an engine with that profile, which learnt from other
    random batches before, and learns nothing from those that count.
    """
    set_xla_flags()
    loaded = random_backbone(backbone)
    runner = PlanRunner(loaded, random_tasks(loaded, methods.split(","), tasks))
    kinds = sorted(set(runner.kinds))
    rng = np.random.default_rng(3)
    plan, lengths = draw_plan(2 * batches, rng)
    chosen = rng.integers(0, tasks, len(lengths))
    queue = Queue.of(lengths, chosen, [kinds.index(runner.kinds[task]) for task in chosen])
    figures = _read_figures(profile, runner, 2048)
    steps = runner.prepare(plan, runner.rows(lengths, chosen.tolist()))
    learnt, counted = steps[:batches], steps[batches:]
    (reference,) = compile_programs(runner.family, [ProgramKey(REFERENCE, Variant())])
    console.log("compiled")

    def run(program: Program, members: Sequence[Row]) -> float:
        assembled = runner.replica.assemble(members, program)
        start = time.perf_counter()
        jax.block_until_ready(runner.replica.dispatch(program, assembled))
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        predictions = _predictions(
            runner, figures, {program.key: program for program, _ in steps}, pathlib.Path(folder)
        )
    for _ in range(passes):
        for program, members in learnt:
            predictions.ran(RowTable(members), program, run(program, members))
    by_engine = np.array([predictions.seconds(RowTable(members), program) for program, members in counted])
    timed = _time(run, counted, reference, full_rows(REFERENCE, runner.family.network), rounds)
    measured_profile = profile_of(figures, priced(key for key, _ in runner.family.slots))
    costs = Costs(measured_profile, Limits(128, 4096, 128), kinds)
    by_profile = np.array([costs.total(queue, [batch]) for batch in plan[batches:]])
    ((n, length),) = REFERENCE.groups
    expected = float(measured_profile.alpha.at([n], [length])[0, 0])
    without = by_profile / expected / timed.over_bare()
    found = {
        "profile": _errors(by_profile / timed.medians)
        | {
            "drift": float(np.median(timed.beside)) / expected,
            "median_error_without_drift": float(np.median(np.abs(without - 1))),
            "median_bias_without_drift": float(np.median(without - 1)),
            "predicted_seconds": by_profile.tolist(),
        },
        "engine": _errors(by_engine / timed.medians)
        | {"predicted_seconds": by_engine.tolist(), "measured_seconds": timed.medians.tolist()},
    }
    settings = {
        "backbone": backbone,
        "batches": batches,
        "tasks": tasks,
        "methods": methods,
        "rounds": rounds,
        "passes": passes,
    }
    report("prediction", settings, found, json_out)


def draw_plan(count: int, rng: np.random.Generator) -> tuple[list[Batch], list[int]]:
    """``count`` batches, of the shapes in turn, and the lengths of all their queries."""
    lengths: list[int] = []
    plan: list[Batch] = []
    for number in range(count):
        bucket = SHAPES[number % len(SHAPES)]
        own = draw_batch(bucket, rng)
        plan.append(Batch(np.arange(len(lengths), len(lengths) + len(own)), bucket.tokens, bucket.groups))
        lengths += own
    return plan, lengths


def _read_figures(path: pathlib.Path | None, runner: PlanRunner, max_tokens: int) -> Figures:
    """The figures in ``path``, or measured now and kept there."""
    if path is not None and path.exists():
        return Figures.from_json(path.read_text())
    start = time.perf_counter()
    found = measure_figures(runner.family, runner.mesh, max_tokens=max_tokens, progress=lambda what, done, total: None)
    console.log(f"figures measured in {time.perf_counter() - start:.0f} s")
    if path is not None:
        path.write_text(found.to_json())
    return found


def _predictions(
    runner: PlanRunner, figures: Figures, programs: Mapping[ProgramKey, Program], folder: pathlib.Path
) -> Predictions:
    """As in an engine: every program ran once; the first and the last shape's are measured, the others' times estimated
    at first."""
    costs = CostTable(folder / "costs.json", runner.family)
    for key, program in programs.items():
        core = key.bucket in (SHAPES[0], SHAPES[-1])
        seconds = measure(runner.replica, program, COARSE_REPEATS if core else 0)
        if core:
            costs.set(key, seconds)
    for key, program in programs.items():
        program.seconds = costs.estimate(key)
    live = LiveProfile(runner.replica, costs, folder / "figures.json")
    live.add(figures)
    return Predictions(costs, live)


def _time(
    run: Callable[[Program, Sequence[Row]], float],
    steps: Sequence[PreparedBatch],
    reference: Program,
    bare: Sequence[Row],
    rounds: int,
) -> Timed:
    times = np.empty((rounds, len(steps)))
    beside = np.empty((rounds, -(-len(steps) // BESIDE)))
    for number in range(-1, rounds):  # one to warm up
        for at, (program, members) in enumerate(steps):
            if at % BESIDE == 0:
                beside[number, at // BESIDE] = run(reference, bare)
            times[number, at] = run(program, members)
    return Timed(times, beside)


def _errors(ratios: np.ndarray) -> dict[str, float]:
    """Of predicted over measured times."""
    return {
        "median_error": float(np.median(np.abs(ratios - 1))),
        "p90_error": float(np.percentile(np.abs(ratios - 1), 90)),
        "median_bias": float(np.median(ratios - 1)),
    }
