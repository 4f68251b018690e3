"""``bench.py curve``: queries a second by the number of tasks of a batch (PetS figures 7 and 8)."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from benches.engine.merged_copies import MergedCopies
from benches.engine.throughput import keep_profile
from benches.shared import (
    answers,
    console,
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
from jpets.engine.engine import Engine
from jpets.types import Query, Task
from jpets.xla_flags import set_xla_flags

MEASURED_TOKENS = 1024
"""Most tokens of a batch of the cost profile."""
ALTERNATIVES = ("seqs", "pars", "stacked")


class Case(NamedTuple):
    """Queries of each task, and their tokens."""

    per_task: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Case:
        per_task, _, length = text.partition("x")
        return cls(int(per_task), int(length))

    def __str__(self) -> str:
        return f"{self.per_task}x{self.length}"

    def queries(self, tasks: Sequence[Task]) -> list[Query]:
        ids = list(range(1000, 1000 + self.length))
        return [Query(task.id, input_ids=ids[task_lead(task).tokens :]) for task in tasks for _ in range(self.per_task)]


def curve(
    backbone: str = "bert-base",
    tasks: Annotated[str, typer.Option(help="numbers of tasks")] = "1,2,4,8,16,32",
    shapes: Annotated[str, typer.Option(help="queries of a task x tokens")] = "1x16,1x32,2x32,1x64",
    methods: str = "mask,diff,bitfit,adapter",
    systems: Annotated[str, typer.Option(help="of pets, seqs, pars and stacked")] = "pets,seqs,pars,stacked",
    rounds: int = 5,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second by the number of tasks that have some at once, beside merged copies and one task alone.

    An engine has a program for each point and measured costs, but plans as it serves: ``batches`` says into how many it
    put the queries. ``single`` is the papers' base: a merged copy of one task with that task's queries.
    """
    set_xla_flags()
    loaded, counts = random_backbone(backbone), [int(count) for count in tasks.split(",")]
    made = random_tasks(loaded, methods.split(","), max(counts))
    cases, chosen = [Case.parse(text) for text in shapes.split(",")], systems.split(",")
    alone = next((task for task in made if all(METHODS[delta.method].merges for delta in task.deltas)), made[0])
    single = MergedCopies(loaded, [alone])
    copies = MergedCopies(loaded, made) if set(ALTERNATIVES) & set(chosen) else None
    figures: dict[str, Any] = {}
    shapes_of_all = _shapes(counts, cases)
    own = EngineSettings(
        background_compile=False,
        max_batch_tokens=max(bucket.tokens for bucket in shapes_of_all),
        max_batch_rows=max(bucket.rows for bucket in shapes_of_all),
        max_length=max(case.length for case in cases),
        slots=len(made),
    )
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(engine_cache())
        keep_profile(Engine(loaded, made, own, cache_dir=cache), min(MEASURED_TOKENS, own.max_batch_tokens))
        engine = stack.enter_context(Engine(loaded, made, own, cache_dir=cache).start(lambda what, done, total: None))
        engine.menu.learn(shapes_of_all)
        for case in cases:
            for count in counts:
                console.log(f"{case}: program of {count} tasks")
                engine.specialise(case.queries(made[:count]))
        for case in cases:
            for count in counts:
                runs: dict[str, Callable[[], object]] = {
                    "pets": partial(answers, engine, case.queries(made[:count])),
                    "single": single.batch(case.per_task, [case.length] * case.per_task).in_turn,
                }
                if copies is not None:
                    runs |= _alternatives(copies, case, count, chosen)
                before = _batches(engine)
                point = _point(runs, case, count, rounds)
                point[f"{case} {count}/pets"]["batches"] = (_batches(engine) - before) / (rounds + 1)
                figures |= point
    settings = {
        "backbone": backbone,
        "tasks": tasks,
        "shapes": shapes,
        "methods": methods,
        "rounds": rounds,
    }
    report("curve", settings, figures, json_out)


def _batches(engine: Engine) -> int:
    (device,) = engine.report().devices
    return device.batches


def _shapes(counts: Sequence[int], cases: Sequence[Case]) -> list[Bucket]:
    """The shape of each point's batch."""
    batches = [(count * case.per_task, case.length) for case in cases for count in counts]
    return [Bucket(rows * length, ((rows, length),)) for rows, length in batches]


def _alternatives(
    copies: MergedCopies, case: Case, count: int, chosen: Sequence[str]
) -> dict[str, Callable[[], object]]:
    batch = copies.batch(case.per_task, [case.length] * count * case.per_task)
    runs: dict[str, Callable[[], object]] = {}
    if "seqs" in chosen:
        runs["seqs"] = batch.in_turn
    if "pars" in chosen:
        runs["pars"] = batch.concurrently
    if "stacked" in chosen:
        runs["stacked"] = batch.stacked()
    return runs


def _point(runs: dict[str, Callable[[], object]], case: Case, count: int, rounds: int) -> dict[str, Any]:
    """Figures of one batch, by ``<shape> <tasks>/<system>``."""
    seconds, found = interleave(runs, rounds), {}
    for name, times in seconds.items():
        queries = case.per_task * (1 if name == "single" else count)
        own: dict[str, Any] = {"qps": queries / statistics.median(times), "seconds": statistics.median(times)}
        if name != "pets":
            ratio = paired_ratio(seconds["pets"], times)
            # Rates, not times: the batches of ``single`` hold one task's queries.
            own["pets_ratio"] = {key: value * count * case.per_task / queries for key, value in ratio.items()}
        found[f"{case} {count}/{name}"] = own
    pets = found[f"{case} {count}/pets"]["qps"]
    console.log(f"{case}, {count} tasks: {pets:.1f} queries/s")
    return found
