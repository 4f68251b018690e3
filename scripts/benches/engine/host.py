"""``bench.py host``: what the host does for a batch, with programs that compute nothing."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.engine.null_model import null_backbone
from benches.engine.owners import owners
from benches.shared import RandomBackbone, console, draw_lengths, random_backbone, random_tasks, report
from jpets.config import EngineSettings
from jpets.engine.batch.assembly import Assembled
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.planning.plan import Plan
from jpets.engine.queue.pending import Pending
from jpets.types import DEFAULT_TENANT, Query, Task
from jpets.xla_flags import set_xla_flags

SWITCH = 2e-5
"""Seconds after which Python threads take turns while the share under Python's lock is measured."""
MEASURED = 0.2
"""Seconds of each measurement of that share."""
LOCK_ROUNDS = 5
WARM_UP = 5
"""Rounds that are not counted."""
DRAINS = 8
"""Rounds that a drain of all owners' backlogs takes the place of."""
IN_A_ROW = 5
"""Batches of one size in a round: an engine plans one after the other."""
BACKLOG = 64
"""Most batches that wait for a device."""
LONGEST = 56
"""Tokens of the longest text."""


def bucket_for(lengths: Sequence[int]) -> Bucket:
    """A packed bucket with just enough tokens for these lengths, and some spare rows."""
    count, longest = len(lengths), max(lengths)
    short = sum(length <= 32 for length in lengths)
    groups = ((short + 2, 32), (count - short + 2, max(33, longest)))
    return Bucket(sum(lengths) + count, groups)


def queries_of(tasks: Sequence[Task], lengths: Sequence[int]) -> list[Query]:
    rng = np.random.default_rng(0)
    return [
        Query(tasks[int(rng.integers(len(tasks)))].id, input_ids=rng.integers(5, 900, length).tolist())
        for length in lengths
    ]


class Batch:
    """Queries that an engine plans as one batch. They come anew for each plan, as plans are kept while they last."""

    def __init__(self, engine: Engine, queries: Sequence[Query]) -> None:
        self.engine = engine
        self._queries = queries
        engine.specialise(queries)
        assert len(self.plan(self.come()).pendings) == len(queries), "the planner split the batch"

    def come(self) -> list[Pending]:
        found = [self.engine.intake.prepare(query, None, 0, DEFAULT_TENANT) for query in self._queries]
        self.engine.intake.give_back(found)
        return [item for item in found if isinstance(item, Pending)]

    def plan(self, waiting: Sequence[Pending]) -> Plan:
        return self.engine._planner.next_batch(waiting)

    def assemble(self, plan: Plan) -> Assembled:
        return self.engine.replica.fill(plan.layout, self.engine.workload.gathered(plan.rows), plan.program)

    def dispatch(self, plan: Plan, assembled: Assembled) -> Any:
        return self.engine.replica.dispatch(plan.program, assembled)

    def timed(self) -> tuple[float, float, float]:
        """Seconds to plan, to assemble and to dispatch; the device's time does not count."""
        waiting = self.come()
        times = [time.perf_counter()]
        plan = self.plan(waiting)
        times.append(time.perf_counter())
        assembled = self.assemble(plan)
        times.append(time.perf_counter())
        outputs = self.dispatch(plan, assembled)
        times.append(time.perf_counter())
        jax.block_until_ready(outputs)
        first, second, third = (end - start for start, end in itertools.pairwise(times))
        return first, second, third

    def whole(self, turns: Iterator[Sequence[Pending]]) -> None:
        plan = self.plan(next(turns))
        self.dispatch(plan, self.assemble(plan))

    def arrays(self) -> int:
        """Arrays of the host that a dispatch passes."""
        return len(self.assemble(self.plan(self.come())).buffers)


def numpy_loop() -> float:
    """Seconds of a fixed amount of the kind of work that the host does: a measure of this machine at this time."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(1, 64, 512)
    start = time.perf_counter()
    for _ in range(20):
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(numbers[order])
        cells = np.repeat(ends - numbers[order], numbers[order])
        np.bincount(cells % 7)
        sum(at for at in range(100))
    return time.perf_counter() - start


class Counting:
    """A thread that counts in pure Python: it gets on only while no other thread holds Python's lock."""

    def __init__(self) -> None:
        self.count = 0
        self._ended = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._ended:
            self.count += 1

    def __enter__(self) -> Counting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    def rate(self, beside: Callable[[], object]) -> float:
        """Counts a second while ``beside`` runs, again and again."""
        before, start = self.count, time.perf_counter()
        while (now := time.perf_counter()) < start + MEASURED:
            beside()
        return (self.count - before) / (now - start)


def share_under_lock(run: Callable[[], object], rounds: int) -> float:
    """The part of ``run``'s time in which it holds Python's lock.

    Let it hold the lock for h seconds and go on without it for f. A thread that only counts then takes turns with it:
    it counts during h + f of 2 h + f seconds. If that is a part r of its rate alone, h / (h + f) = (1 - r) / r.
    """
    interval, found = sys.getswitchinterval(), []
    sys.setswitchinterval(SWITCH)
    try:
        with Counting() as counting:
            for _ in range(rounds):
                alone = counting.rate(lambda: time.sleep(0.01))
                rate = counting.rate(run) / alone
                found.append(min(1.0, max(0.0, (1 - rate) / rate)))
    finally:
        sys.setswitchinterval(interval)
    return statistics.median(found)


def host_engine(
    backbone: RandomBackbone, tasks: Sequence[Task], buckets: Sequence[Bucket], folder: pathlib.Path, device: jax.Device
) -> Engine:
    """An engine of which the batches are as large as the largest of these buckets."""
    largest = max(buckets, key=lambda bucket: bucket.tokens)
    settings = EngineSettings(
        background_compile=False,
        max_batch_tokens=largest.tokens,
        max_batch_rows=largest.rows,
        max_queue=BACKLOG * largest.rows,
        slots=len(tasks),
    )
    engine = Engine(backbone, tasks, settings, cache_dir=folder, buckets=buckets, devices=[device])
    return engine.start(lambda what, done, total: console.log(f"{what} {done}/{total}") if what == "programs" else None)


def steps(batches: Mapping[int, Batch], rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of each size of batch."""
    seconds: dict[int, list[tuple[float, float, float, float]]] = {rows: [] for rows in batches}
    for number in range(rounds + WARM_UP):
        for rows, batch in batches.items():
            times = [(*batch.timed(), numpy_loop()) for _ in range(IN_A_ROW)]
            if number >= WARM_UP:
                seconds[rows] += times
    turns = {rows: itertools.cycle([batch.come() for _ in range(WARM_UP)]) for rows, batch in batches.items()}
    figures: dict[str, dict[str, Any]] = {}
    for rows, batch in batches.items():
        plan, assemble, dispatch, loop = np.array(seconds[rows]).T * 1e3
        total = plan + assemble + dispatch
        own = {"plan_ms": plan, "assemble_ms": assemble, "dispatch_ms": dispatch, "total_ms": total}
        figures[f"{rows} rows"] = {
            **{name: float(np.median(times)) for name, times in own.items()},
            "least_tenth_ms": float(np.quantile(total, 0.1)),
            "numpy_loop_ms": float(np.median(loop)),
            "of_numpy_loop": float(np.median(total / loop)),
            "under_lock": share_under_lock(functools.partial(batch.whole, turns[rows]), LOCK_ROUNDS),
            "host_arrays": batch.arrays(),
        }
    return figures


def host(
    backbone: str = "minilm-l6",
    tasks: int = 32,
    methods: str = "adapter,lora,bitfit,mask,diff",
    rows: str = "32,128,512",
    length_std: float = 8,
    rounds: int = 40,
    devices: int = 1,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Milliseconds to plan, assemble and dispatch a batch, beside a fixed numpy loop; the part of that time under
    Python's lock, and the arrays that a dispatch passes. With several devices: batches a second of 1, 2, 4 ... owners.
    """
    set_xla_flags()
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    sizes = [int(size) for size in rows.split(",")]
    model = random_backbone(backbone)
    made = random_tasks(model, methods.split(","), tasks)
    asked = {size: queries_of(made, draw_lengths(size, 32, length_std, LONGEST)) for size in sizes}
    buckets = {size: bucket_for([query_length(query) for query in own]) for size, own in asked.items()}
    settings = {
        "backbone": backbone,
        "tasks": tasks,
        "methods": methods,
        "rows": rows,
        "length_std": length_std,
        "rounds": rounds,
        "devices": devices,
        "buckets": {size: str(bucket) for size, bucket in buckets.items()},
    }
    with null_backbone(model) as null, contextlib.ExitStack() as open_engines:
        folder = pathlib.Path(open_engines.enter_context(tempfile.TemporaryDirectory()))
        engines = [
            open_engines.enter_context(host_engine(null, made, list(buckets.values()), folder, device))
            for device in jax.devices()[:devices]
        ]
        if devices > 1:
            figures = owners(engines, asked[sizes[0]], max(1, rounds // DRAINS))
        else:
            figures = steps({size: Batch(engines[0], own) for size, own in asked.items()}, rounds)
    report("host", settings, figures, json_out)


def query_length(query: Query) -> int:
    assert query.input_ids is not None
    return len(query.input_ids)
