"""``bench batching``: every policy over the same queries (PetS figure 12, TurboTransformers' lengths, a long tail)."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.scheduling.plan_runner import PlanRunner, PreparedBatch
from benches.scheduling.profiles import load_profile
from benches.scheduling.served import ServedEngine
from benches.shared import console, interleave, paired_ratio, random_backbone, random_tasks, report
from jpets.config import EngineSettings
from jpets.engine.costs.batch_limits import with_batch_limits
from jpets.engine.costs.profile_measurement import measure_profile
from jpets.scheduling.costs.measured_profile import CostProfile
from jpets.scheduling.costs.policy_lookup import Costs, Limits
from jpets.scheduling.policies.auto import FIXED_SIZES, POLICIES, auto
from jpets.scheduling.policies.offline import fixed
from jpets.scheduling.queue import Batch, Batches, Queue
from jpets.xla_flags import set_xla_flags


def draw(kind: str, count: int, std: float, longest: int) -> np.ndarray:
    """Query lengths in tokens: ``gaussian`` (mean 32), ``turbo`` (normal over 5 to 500), ``long-tail`` (log-normal,
    median 24, up to 500)."""
    rng = np.random.default_rng(1)
    if kind == "gaussian":
        drawn = rng.normal(32, std, count)
    elif kind == "turbo":
        drawn = np.clip(rng.normal(252.5, 82.5, count), 5, 500)
    else:
        drawn = np.clip(rng.lognormal(np.log(24), 0.8, count), 3, 500)
    return np.clip(np.rint(drawn), 3, longest).astype(np.int_)


def windows(queue: Queue, size: int | None) -> list[np.ndarray]:
    """Queries that are planned together: all, or so many at a time, as a server sees them."""
    every = np.arange(len(queue))
    return [every] if size is None else np.split(every, range(size, len(queue), size))


def plan_windows(queue: Queue, size: int | None, policy: Callable[[Queue], Batches]) -> Batches:
    plan: Batches = []
    for part in windows(queue, size):
        own = Queue(queue.lengths[part], queue.tasks[part], queue.kinds[part])
        plan += [Batch(part[batch.queries], batch.tokens, batch.groups) for batch in policy(own)]
    return plan


def read_profile(
    path: pathlib.Path | None,
    runner: PlanRunner,
    max_tokens: int,
) -> CostProfile:
    """The profile in ``path``, or measured now and kept there."""
    if path is not None and path.exists():
        return load_profile(path)
    start = time.perf_counter()
    profile = measure_profile(
        runner.family, runner.mesh, max_tokens=max_tokens, progress=lambda what, done, total: None
    )
    console.log(f"profile measured in {time.perf_counter() - start:.0f} s")
    if path is not None:
        path.write_text(profile.to_json())
    return profile


def batching(
    backbone: str = "minilm-l6",
    queries: int = 1024,
    tasks: int = 32,
    std: float = 8.0,
    lengths: str = "gaussian",
    window: Annotated[int | None, typer.Option(help="queries that are planned at a time; all by default")] = None,
    methods: str = "adapter,mask,diff,bitfit",
    policies: str = "fixed,alpha,beta,coordinated,turbo,packed,length-buffer,auto",
    max_rows: Annotated[int, typer.Option(help="most rows of a batch; 0: as a server has it")] = 0,
    max_tokens: Annotated[int, typer.Option(help="most tokens of a batch; 0: as a server has it")] = 0,
    rounds: int = 9,
    served: Annotated[
        str, typer.Option(help="policies that engines serve with beside the exact plans: auto,alpha,coordinated")
    ] = "",
    warm_up: Annotated[float, typer.Option(help="seconds of traffic for each engine before it is timed")] = 180.0,
    profile: Annotated[pathlib.Path | None, typer.Option(help="cost profile to read, or to write")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second by batching policy. The papers' policies pad (T = N L); lengths go in steps of 8.

    Plans have programs of exactly their shapes. With ``--served`` engines serve the same queries in the same rounds, by
    default settings and in the programs that they have made for such traffic. Batches of both have the same limits.
    """
    set_xla_flags()
    asked = EngineSettings(max_batch_rows=max_rows, max_batch_tokens=max_tokens)
    own = with_batch_limits(asked, jax.default_backend(), ())
    loaded = random_backbone(backbone)
    made = random_tasks(loaded, methods.split(","), tasks)
    runner = PlanRunner(loaded, made)
    kinds = sorted(set(runner.kinds))
    drawn = draw(lengths, queries, std, loaded.config.max_positions)
    task = np.random.default_rng(2).integers(0, tasks, queries)
    queue = Queue.of(drawn, task, [kinds.index(runner.kinds[t]) for t in task])
    longest = int(drawn.max())
    limits = Limits(own.max_batch_rows, max(own.max_batch_tokens, -(-longest // 8) * 8), longest)
    costs = Costs(read_profile(profile, runner, own.max_batch_tokens), limits, kinds)
    rows = runner.rows(drawn.tolist(), task.tolist())

    prepared, plans, planning = prepare_policies(runner, rows, queue, window, costs, policies.split(","))
    systems: dict[str, Callable[[], object]] = {name: partial(runner.run, steps) for name, steps in prepared.items()}
    with contextlib.ExitStack() as stack:
        engines = {}
        for policy in filter(None, served.split(",")):
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = ServedEngine(loaded, made, policy, folder, window, limits)
            stack.callback(engine.engine.close)
            engine.warm_up(drawn, task, warm_up)
            engines[f"served {policy}"] = engine
            systems[f"served {policy}"] = partial(engine.run, engine.queries(drawn.tolist(), task.tolist()))
        seconds = interleave(systems, rounds)
        measured = {name: own.figures() for name, own in engines.items()}
    sizes = [name for name in seconds if name.startswith("fixed")]
    fixed_name = min(sizes, key=lambda name: statistics.median(seconds[name]), default=None)
    figures = {
        name: _figures(name, times, seconds, queue, plans[name], planning[name], costs, fixed_name)
        for name, times in seconds.items()
        if name in plans
    }
    for name, own_figures in measured.items():
        figures[name] = _served_figures(name, seconds, len(queue)) | own_figures
    settings = {
        "backbone": backbone,
        "queries": queries,
        "tasks": tasks,
        "std": std,
        "lengths": lengths,
        "window": window,
        "methods": methods,
        "max_rows": max_rows,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "warm_up": warm_up if served else None,
        "best_fixed": fixed_name,
    }
    report("batching", settings, figures, json_out)


def prepare_policies(
    runner: PlanRunner, rows: Sequence[Any], queue: Queue, window: int | None, costs: Costs, names: Sequence[str]
) -> tuple[dict[str, list[PreparedBatch]], dict[str, Batches], dict[str, float]]:
    """Steps, plan and planning seconds of each policy; ``fixed`` once for each batch size worth a measurement."""
    policies: dict[str, Callable[[Queue], Batches]] = {}
    for name in names:
        if name == "fixed":
            sizes = sorted(
                (size for size in FIXED_SIZES if size <= costs.limits.rows),
                key=lambda size: costs.total(
                    queue, plan_windows(queue, window, partial(fixed, costs=costs, size=size))
                ),
            )
            for size in sizes[:2]:
                policies[f"fixed-{size}"] = partial(fixed, costs=costs, size=size)
        elif name == "auto":
            policies[name] = lambda q: auto(q, costs).plan
        else:
            policies[name] = partial(POLICIES[name], costs=costs)
    prepared: dict[str, list[PreparedBatch]] = {}
    plans: dict[str, Batches] = {}
    planning: dict[str, float] = {}
    for name, policy in policies.items():
        times = []
        for _ in range(3):
            start = time.perf_counter()
            plans[name] = plan_windows(queue, window, policy)
            times.append(time.perf_counter() - start)
        planning[name] = statistics.median(times)
        start = time.perf_counter()
        prepared[name] = runner.prepare(plans[name], rows)
        console.log(f"{name}: {len(plans[name])} batches, compiled in {time.perf_counter() - start:.0f} s")
    return prepared, plans, planning


def _served_figures(name: str, seconds: Mapping[str, list[float]], count: int) -> dict[str, Any]:
    """A served policy beside exact plans and beside served ``alpha``."""
    median = statistics.median(seconds[name])
    found: dict[str, Any] = {"qps": count / median, "seconds": median}
    for other in ("packed", name.removeprefix("served "), "served alpha"):
        if other in seconds and other != name:
            found[f"over_{other.replace(' ', '_')}"] = paired_ratio(seconds[name], seconds[other])
    return found


def _figures(
    name: str,
    times: list[float],
    seconds: Mapping[str, list[float]],
    queue: Queue,
    plan: Batches,
    planning: float,
    costs: Costs,
    fixed_name: str | None,
) -> dict[str, Any]:
    median = statistics.median(times)
    found: dict[str, Any] = {
        "qps": len(queue) / median,
        "seconds": median,
        "predicted": costs.total(queue, plan),
        "planning": planning,
        "batches": len(plan),
        "linear_padding": sum(batch.tokens for batch in plan) / int(queue.lengths.sum()) - 1,
    }
    if name == "packed" and fixed_name is not None:
        found["over_best_fixed"] = paired_ratio(times, seconds[fixed_name])
    if name == "packed":
        others = [n for n in ("alpha", "beta", "coordinated", "turbo") if n in seconds]
        if others:
            best = min(others, key=lambda n: statistics.median(seconds[n]))
            found["best_other"] = best
            found["over_best_other"] = paired_ratio(times, seconds[best])
    if name == "auto":
        best = min(seconds, key=lambda n: statistics.median(seconds[n]))
        found["best"] = best
        found["over_best"] = paired_ratio(times, seconds[best])
    return found
