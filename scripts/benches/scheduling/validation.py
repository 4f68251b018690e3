"""``bench.py validation``: the simulator beside real engines on several devices.

A machine whose devices share their cores cannot show the throughput of several devices. Here the engines, queues,
threads, planning and moves are real, and so are the answers of a tiny backbone. Only the time of a batch on its device
is the simulation's, slower by ``--slowdown`` so that the host never limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.engine.capacity import classes_by_method
from benches.scheduling.migration import METHODS, BackboneOption, LoadOption, ProfileOption, read_costs, rules
from benches.scheduling.profiles import digest_of_file, load_profile
from benches.shared import RandomBackbone, console, random_backbone, random_tasks, report
from jpets.config import BackboneConfig, EngineSettings
from jpets.engine.batch.assembly import Assembled
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.group.balancer import HALF_LIFE
from jpets.engine.group.group import EngineGroup
from jpets.engine.programs.program import Program
from jpets.engine.queue.pending import Pending
from jpets.model.encoder import Params, random_params
from jpets.model.forward import Outputs
from jpets.scheduling.balancing.rounds import AdaptiveInterval
from jpets.scheduling.costs.measured_profile import CostProfile, Grid
from jpets.scheduling.costs.policy_lookup import Limits
from jpets.scheduling.simulate.cluster import Cluster
from jpets.scheduling.simulate.run import simulate
from jpets.scheduling.simulate.systems import System, by_improved
from jpets.scheduling.simulate.traffic import Traffic, draw_traffic
from jpets.types import DEFAULT_TENANT, Query, Result, Task

TINY = BackboneConfig("bert", 2000, 64, 2, 2, 128, 512)
ROWS, LONGEST, TOKENS = 128, 128, 4096
BUCKETS = [Bucket(1024, ((32, 64), (4, 128))), Bucket(TOKENS + LONGEST, ((ROWS, 64), (16, 128)))]
OURS = System(
    by_improved, AdaptiveInterval(start=2.0), half_life=HALF_LIFE, rate=EngineSettings().move_mb_per_second * 1e6
)
SYSTEMS = {"none": System(), "ours": OURS}


class Late:
    """An array of a batch that is on an emulated device until ``at``."""

    def __init__(self, array: jax.Array, at: float) -> None:
        self._array, self._at = array, at

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        time.sleep(max(0.0, self._at - time.monotonic()))
        return np.asarray(self._array, dtype)


class EmulatedDevice:
    """Lets an engine's device take the time that ``cluster`` predicts for each batch, one batch after another."""

    def __init__(self, engine: Engine, cluster: Cluster, numbers: dict[str, int]) -> None:
        self._cluster, self._numbers = cluster, numbers
        self._dispatch = engine.replica.dispatch
        self._batch: Sequence[Pending] = ()
        self._free = 0.0
        engine.hooks.append(self._coming)
        engine.replica.dispatch = self._run  # type: ignore[method-assign]
        engine.query_weight = self._weight  # type: ignore[method-assign]

    def _weight(self, id: str, *, tenant: str = DEFAULT_TENANT) -> float | None:
        del tenant
        return float(self._cluster.weights[self._numbers[id]])

    def _coming(self, batch: Sequence[Pending]) -> None:
        self._batch = list(batch)

    def _run(self, program: Program, assembled: Assembled, params: Params | None = None) -> Outputs:
        outputs = self._dispatch(program, assembled, params)
        lengths = np.array([pending.row.length for pending in self._batch])
        tasks = np.array([self._numbers[str(pending.task)] for pending in self._batch])
        seconds = sum(each for each, _ in self._cluster.batches(lengths, tasks))
        self._free = max(self._free, time.monotonic()) + seconds
        late: Outputs = jax.tree.map(lambda array: Late(array, self._free), outputs)
        return late


def slower(profile: CostProfile, factor: float) -> CostProfile:
    def grid(each: Grid) -> Grid:
        return dataclasses.replace(each, seconds=each.seconds * factor)

    return dataclasses.replace(
        profile,
        alpha=grid(profile.alpha),
        packed=tuple(dataclasses.replace(point, seconds=point.seconds * factor) for point in profile.packed),
        beta={name: grid(each) for name, each in profile.beta.items()},
    )


@contextlib.contextmanager
def emulated(
    cluster: Cluster, backbone: RandomBackbone, tasks: Sequence[Task], cache: pathlib.Path, system: System
) -> Iterator[EngineGroup]:
    settings = EngineSettings(
        max_length=LONGEST,
        max_batch_tokens=TOKENS,
        max_batch_rows=ROWS,
        slots=len(tasks),
        max_queue=1 << 20,
        background_compile=False,
    )
    rule = system.interval if system.balancer else None
    devices = jax.local_devices()[: cluster.devices]
    group = EngineGroup(backbone, devices, settings, reserve=tasks, cache_dir=cache, buckets=BUCKETS, interval=rule)
    for task in tasks:
        group.register_task(task.id, lambda task=task: task)  # type: ignore[misc]
    with group.start():
        group.warm([task.id for task in tasks])
        while group.warming:
            time.sleep(0.1)
        numbers = {task.id: number for number, task in enumerate(tasks)}
        for member in group._members:  # what a device takes is no business of the interface
            EmulatedDevice(member, cluster, numbers)
        group.balancer.interval = rule.start if rule is not None else group.balancer.interval  # it grew while idle
        yield group


def serve(group: EngineGroup, tasks: Sequence[Task], traffic: Traffic) -> np.ndarray:
    """Seconds from each query's arrival to its answer."""
    ids = list(range(5, 5 + LONGEST))
    answered = np.full(len(traffic), np.nan)
    start, futures = time.monotonic(), []
    for number, at in enumerate(traffic.arrived.tolist()):
        time.sleep(max(0.0, start + at - time.monotonic()))
        query = Query(tasks[int(traffic.tasks[number])].id, input_ids=ids[: int(traffic.lengths[number])])
        (future,) = group.submit([query])
        future.add_done_callback(partial(_note, answered, number, start))
        futures.append(future)
    for future in futures:
        if (error := future.result().error) is not None:
            raise error
    return answered - traffic.arrived


def _note(answered: np.ndarray, number: int, start: float, future: Future[Result]) -> None:
    del future
    answered[number] = time.monotonic() - start


def validation(
    profile: ProfileOption,
    backbone: BackboneOption = "minilm-l6",
    methods: str = METHODS,
    devices: str = "2,4",
    tasks: int = 64,
    seconds: Annotated[float, typer.Option(help="length of each run")] = 40.0,
    load: LoadOption = 1.0,
    slowdown: Annotated[float, typer.Option(help="times as long as in the profile")] = 8.0,
    seeds: int = 3,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second and latencies of real engines over what the simulator predicts of them, by devices."""
    sizes = list(map(int, devices.split(",")))
    jax.config.update("jax_num_cpu_devices", max(sizes))
    each = methods.split(",")
    measured = slower(load_profile(profile), slowdown)
    limits = Limits(rows=ROWS, tokens=TOKENS, longest=LONGEST)
    costs = read_costs(measured, limits, classes_by_method(random_backbone(backbone), each))
    tiny = RandomBackbone("tiny", TINY, jax.tree.map(np.asarray, random_params(TINY)))
    made = random_tasks(tiny, each, tasks)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for size in sizes:
            cluster = Cluster(size, np.arange(tasks) % len(each), np.ones(tasks), costs)
            rate = load * cluster.rate(seed=0)
            console.log(f"{size} devices: {rate:.0f} queries a second")
            for name, system in SYSTEMS.items():
                runs = []
                for seed in range(seeds):
                    traffic = draw_traffic(tasks, round(rate * seconds), rate, seed=seed)
                    with emulated(cluster, tiny, made, pathlib.Path(cache), system) as group:
                        placement = [
                            [n for n in range(tasks) if group.devices_of(made[n].id) == (d,)] for d in range(size)
                        ]
                        took = serve(group, made, traffic)
                        moves = sum(group.mover.counts[kind] for kind in ("moved", "copied"))
                    outcome = simulate(cluster, traffic, placement, system)
                    runs.append(_run(traffic, took, outcome.latencies, moves, sum(r.moves for r in outcome.rounds)))
                figures[f"{size} devices, {name}"] = {
                    key: statistics.median(run[key] for run in runs) for key in runs[0]
                } | {"runs": runs}
                console.log(name, figures[f"{size} devices, {name}"])
    settings = {
        "profile": profile.name,
        "profile_digest": digest_of_file(profile),
        "methods": methods,
        "tasks": tasks,
        "seconds": seconds,
        "load": load,
        "slowdown": slowdown,
        "seeds": seeds,
        "rules": rules(SYSTEMS),
    }
    report("validation", settings, figures, json_out)


def _run(traffic: Traffic, real: np.ndarray, simulated: np.ndarray, moves: int, expected: int) -> dict[str, float]:
    def qps(took: np.ndarray) -> float:
        return len(traffic) / float((traffic.arrived + took).max())

    return {
        "qps": qps(real),
        "simulated_qps": qps(simulated),
        "qps_of_simulated": qps(real) / qps(simulated),
        "p50_ms": 1e3 * float(np.percentile(real, 50)),
        "simulated_p50_ms": 1e3 * float(np.percentile(simulated, 50)),
        "p99_ms": 1e3 * float(np.percentile(real, 99)),
        "simulated_p99_ms": 1e3 * float(np.percentile(simulated, 99)),
        "moves": moves,
        "simulated_moves": expected,
    }
