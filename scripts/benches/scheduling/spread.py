"""``bench.py spread``: policies by the spread of lengths and the number of tasks (PetS figure 12)."""

from __future__ import annotations

import json
import pathlib
import statistics
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from benches.scheduling.batching import draw, prepare_policies, read_profile
from benches.scheduling.plan_runner import PlanRunner
from benches.shared import (
    COMMIT,
    console,
    interleave,
    machine,
    paired_ratio,
    random_backbone,
    random_tasks,
    report,
    versions,
)
from jpets.scheduling.costs.policy_lookup import Costs, Limits
from jpets.scheduling.queue import Queue
from jpets.xla_flags import set_xla_flags


def spread(
    backbone: str = "minilm-l6",
    queries: int = 1024,
    tasks: Annotated[str, typer.Option(help="numbers of tasks")] = "32,64,128",
    stds: Annotated[str, typer.Option(help="deviations of the lengths, in tokens; their mean is 32")] = "1,2,4,8",
    methods: str = "adapter,mask,diff,bitfit",
    policies: str = "fixed,alpha,beta,coordinated,packed",
    max_rows: int = 128,
    max_tokens: int = 4096,
    rounds: int = 5,
    profile: Annotated[pathlib.Path | None, typer.Option(help="cost profile to read, or to write")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of each policy's plans, in programs of exactly their shapes.

    The file is written after every case. A second call with the same file goes on where the first one ended.
    """
    set_xla_flags()
    loaded, counts = random_backbone(backbone), [int(count) for count in tasks.split(",")]
    runner = PlanRunner(loaded, random_tasks(loaded, methods.split(","), max(counts)))
    kinds = sorted(set(runner.kinds))
    settings = {
        "backbone": backbone,
        "queries": queries,
        "tasks": tasks,
        "stds": stds,
        "methods": methods,
        "policies": policies,
        "max_rows": max_rows,
        "max_tokens": max_tokens,
        "rounds": rounds,
    }
    figures = _kept(json_out, settings)
    measured = read_profile(profile, runner, max_tokens)
    for std in map(float, stds.split(",")):
        runner.forget_programs()  # other lengths have other shapes
        for count in counts:
            case = f"std {std:g}, {count} tasks"
            if any(name.startswith(f"{case}/") for name in figures):
                continue
            drawn = draw("gaussian", queries, std, loaded.config.max_positions)
            task = np.random.default_rng(2).integers(0, count, queries)
            queue = Queue.of(drawn, task, [kinds.index(runner.kinds[t]) for t in task])
            costs = Costs(measured, Limits(max_rows, max_tokens, int(drawn.max())), kinds)
            rows = runner.rows(drawn.tolist(), task.tolist())
            steps, plans, _ = prepare_policies(runner, rows, queue, None, costs, policies.split(","))
            seconds = interleave({name: partial(runner.run, own) for name, own in steps.items()}, rounds)
            for name, times in seconds.items():
                own: dict[str, Any] = {"qps": queries / statistics.median(times), "batches": len(plans[name])}
                for other, theirs in seconds.items():
                    if name in ("coordinated", "packed") and other != name:
                        own[f"over_{other}"] = paired_ratio(times, theirs)
                figures[f"{case}/{name}"] = own
            console.log(case, {name: round(queries / statistics.median(times)) for name, times in seconds.items()})
            report("spread", settings, figures, json_out)


def _kept(path: pathlib.Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Figures of an earlier call with the same settings, of this commit, machine and versions."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    now = {"settings": settings, "commit": COMMIT, "machine": machine(), "versions": versions()}
    return dict(found["systems"]) if all(found.get(key) == own for key, own in now.items()) else {}
