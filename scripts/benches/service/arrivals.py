"""``bench.py arrivals``: response times of very many tenants, each with a task of its own (HMI section 7.4)."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import statistics
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benches.engine.paging import serving, touch, write_tasks
from benches.shared import RandomBackbone, console, random_backbone, report, usual_family
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import Bucket, make_variant
from jpets.engine.batch.rows import Row
from jpets.engine.programs.program import ProgramKey, compile_program
from jpets.engine.workloads.encoder_network import INPUTS
from jpets.model.encoder import cast_params
from jpets.types import Query
from jpets.xla_flags import set_xla_flags

LENGTH = 32
SENDERS, APART, EACH, PAUSE = 250, 0.05, 50, 1.2
"""HMI's burst: ``SENDERS`` threads start ``APART`` seconds after each other and each send ``EACH`` requests, one in
``PAUSE`` seconds: 12,500 in 72.5 s."""
ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of queries that there are programs for."""
Submit = Callable[[int], Future[Any]]


class Arrivals(NamedTuple):
    """Queries at these seconds [queries] for these tenants [queries], in order of time."""

    seconds: np.ndarray
    tenants: np.ndarray


def steady(tenants: int, period: float, seconds: float, seed: int) -> Arrivals:
    """Every tenant sends one query every ``period`` seconds, from a time of its own on."""
    rng = np.random.default_rng(seed)
    first = rng.uniform(0, period, tenants)
    times = [first + turn * period for turn in range(int(seconds / period) + 1)]
    at, who = np.concatenate(times), np.tile(np.arange(tenants), len(times))
    order = np.argsort(at)
    order = order[at[order] < seconds]
    return Arrivals(at[order], who[order])


def burst(tenants: int, scale: float, seed: int) -> Arrivals:
    """HMI's burst with ``scale`` times as many senders over the same time, each request for a tenant at random."""
    senders = max(1, round(SENDERS * scale))
    starts = np.arange(senders) * APART / scale
    at = np.sort((starts[:, None] + np.arange(EACH) * PAUSE).ravel())
    return Arrivals(at, np.random.default_rng(seed).integers(0, tenants, len(at)))


SWAPPED_FIRST = 64
"""Queries of ``swapping`` that are not timed."""


class ModelSwapping:
    """HMI's BERT-dedicated: whole models in host memory, as many on the device as there is room for; the least recently
    used one leaves. Requests run one after the other."""

    def __init__(self, backbone: RandomBackbone, room: int) -> None:
        self._host = jax.tree.map(np.asarray, cast_params(backbone.params, "bfloat16"))
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._host))
        self._room = max(1, room // self.nbytes)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        key = ProgramKey(Bucket(LENGTH, ((1, LENGTH),)), make_variant({}))
        self._program = compile_program(usual_family(backbone.config), key)
        ids = np.arange(1000, 1000 + LENGTH, dtype=np.int32)
        self._batch = assemble([Row.of_tokens(ids, np.zeros_like(ids), {}, 0)], key.bucket, key.variant, INPUTS)
        self._thread = ThreadPoolExecutor(1)
        self.swaps = 0

    def submit(self, tenant: int) -> Future[Any]:
        return self._thread.submit(self._answer, tenant)

    def close(self) -> None:
        self._thread.shutdown()

    def _answer(self, tenant: int) -> np.ndarray:
        _, outputs = self._program(self._params(tenant), {}, (), self._batch)
        return np.asarray(outputs.pooled)

    def _params(self, tenant: int) -> Any:
        if tenant not in self._kept:
            if len(self._kept) >= self._room:
                self._kept.popitem(last=False)
            # A copy: a device that is the host's own memory would otherwise have nothing to swap.
            self._kept[tenant] = jax.block_until_ready(
                jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self._host)
            )
            self.swaps += 1
        self._kept.move_to_end(tenant)
        return self._kept[tenant]


def play(arrivals: Arrivals, submit: Submit) -> np.ndarray:
    """Seconds from each query's due time to its answer [queries]; a sender does not wait for answers. Raises the first
    error of an answer."""
    seconds = np.zeros(len(arrivals.seconds))
    left = threading.Semaphore(0)
    began = time.perf_counter()

    def answered(at: int, due: float, future: Future[Any]) -> None:
        del future
        seconds[at] = time.perf_counter() - began - due
        left.release()

    futures = []
    for at, (due, tenant) in enumerate(zip(arrivals.seconds, arrivals.tenants, strict=True)):
        if (wait := began + due - time.perf_counter()) > 0:
            time.sleep(wait)
        futures.append(submit(int(tenant)))
        futures[-1].add_done_callback(functools.partial(answered, at, due))
    for _ in seconds:
        left.acquire()
    for future in futures:
        if (error := getattr(future.result(), "error", None)) is not None:
            raise error
    return seconds


def arrivals(
    backbone: str = "minilm-l6",
    tasks: int = 10000,
    slots: int = 255,
    methods: str = "adapter,lora,bitfit",
    rates: Annotated[str, typer.Option(help="queries a second of all tenants together")] = "25,50,100",
    bursts: Annotated[str, typer.Option(help="parts of HMI's burst of 208 queries a second")] = "0.5",
    seconds: float = 40.0,
    host_memory_gb: float = 6.0,
    systems: str = "paged,eager,resident,swapping",
    rounds: int = 1,
    folder: Annotated[pathlib.Path | None, typer.Option(help="task files are kept here; else a temporary one")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Response times where every tenant sends a query every (tenants / rate) seconds, and under a burst.

    ``paged`` has ``slots`` tasks of a class on the device; ``eager`` too, but it brings a task only when nothing else
    is left to do; ``resident`` has all. ``swapping`` has as many whole models as fit the memory of ``paged``'s slots.
    """
    set_xla_flags()
    model, each = random_backbone(backbone), methods.split(",")
    with contextlib.ExitStack() as stack:
        kept = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        names = write_tasks(kept, model, each, tasks)
        chosen = {
            name: stack.enter_context(system(name, model, kept, names, each, slots, host_memory_gb))
            for name in systems.split(",")
        }
        plans = {
            **{f"rate {rate}": steady(tasks, tasks / float(rate), seconds, 1) for rate in rates.split(",") if rate},
            **{f"burst {part}": burst(tasks, float(part), 2) for part in bursts.split(",") if part},
        }
        figures: dict[str, Any] = {}
        for plan, when in plans.items():
            times: dict[str, list[np.ndarray]] = {name: [] for name in chosen}
            for _ in range(rounds):
                for name, submit in chosen.items():
                    times[name].append(play(when, submit))
                    console.log(f"{plan}, {name}: median {np.median(times[name][-1]) * 1e3:.0f} ms")
            for name, found in times.items():
                figures[f"{plan}/{name}"] = {
                    "queries": len(when.seconds),
                    "mean": statistics.median(float(np.mean(own)) for own in found),
                    "p50": statistics.median(float(np.median(own)) for own in found),
                    "p99": statistics.median(float(np.percentile(own, 99)) for own in found),
                }
    settings = {
        "backbone": backbone,
        "tasks": tasks,
        "slots": slots,
        "methods": methods,
        "seconds": seconds,
        "rounds": rounds,
        "host_memory_gb": host_memory_gb,
    }
    report("arrivals", settings, figures, json_out)


@contextlib.contextmanager
def system(
    name: str,
    model: RandomBackbone,
    folder: pathlib.Path,
    names: Sequence[str],
    methods: Sequence[str],
    slots: int,
    host_memory_gb: float,
) -> Iterator[Submit]:
    """How to send a query of a tenant. All are warm: engines have had a query for each task, ``swapping`` some."""
    make = functools.partial(serving, model, folder, names, methods, ROWS)
    if name == "swapping":
        with make(slots=slots) as engine:
            room = engine.report().devices[0].memory.banks
        swapping = ModelSwapping(model, room)
        try:
            for future in [swapping.submit(tenant) for tenant in range(min(SWAPPED_FIRST, len(names)))]:
                future.result()
            yield swapping.submit
        finally:
            swapping.close()
        return
    settings: dict[str, dict[str, Any]] = {
        "paged": {"slots": slots, "host_memory_gb": host_memory_gb},
        "eager": {"slots": slots, "host_memory_gb": host_memory_gb, "prefetch": False},
        "resident": {"slots": len(names) // len(methods) + 1},
    }
    with make(**settings[name]) as engine:
        touch(engine, names, name)
        ids = list(range(1000, 1000 + LENGTH))
        yield lambda tenant: engine.submit([Query(names[tenant], input_ids=ids)])[0]
