"""``bench.py registered``: how long a server of very many tasks takes to start, and its answers then."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer
from served import MINILM, Served, serve

from benches.shared import console, report
from checkpoints.blobs import LocalBlobs, digest_of
from jpets.deltas import METHODS
from jpets.types import BackboneRef, Head, LoadedBackbone, Task

LABELS = 4
SETTINGS = {"lora": {"rank": 1, "sites": ["query", "value"]}, "bitfit": {}}
"""Small files: a start must not depend on how large they are."""


class HastyBlobs(LocalBlobs):
    """Files that a crash may lose: so a hundred thousand of them are written fast."""

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        digest = digest or digest_of(data)
        self.path(digest).write_bytes(data)
        return digest

    def sync(self) -> None:
        """Not at all."""


def fill(folder: pathlib.Path, tasks: int, backbone: LoadedBackbone) -> list[str]:
    """Ids of ``tasks`` tasks in a repository, each with numbers of its own; tasks that are there stay."""
    from checkpoints.repository import Repository  # machines that only measure engines lack what these need
    from checkpoints.task_file import task_to_bytes

    repository = Repository(folder, blobs=HastyBlobs(folder / "blobs"))
    there = {task.id for task in repository.index("nobody")}
    names = [f"task-{number:06}" for number in range(tasks)]
    for number, name in enumerate(names):
        if name in there:
            continue
        task = small_task(name, backbone, number, "bitfit" if number % 50 == 0 else "lora")
        repository.put(name, task_to_bytes(task, "bfloat16"))
        if number % 5000 == 4999:
            console.log(f"{number + 1} tasks stored")
    repository.close()
    return names


def small_task(id: str, backbone: LoadedBackbone, seed: int | Sequence[int], method: str) -> Task:
    """One of ``LABELS`` labels, with random numbers."""
    rng = np.random.default_rng(seed)
    delta = METHODS[method].init(rng, SETTINGS[method], backbone.config, 0.02)
    kernel = rng.standard_normal((backbone.config.hidden_size, LABELS), np.float32)
    head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(LABELS, np.float32)})
    return Task(id, BackboneRef.of(backbone), (delta,), head, tuple(f"label-{label}" for label in range(LABELS)))


def registered(
    tasks: int = 100_000,
    queries: int = 200,
    starts: int = 3,
    slots: int = 255,
    folder: Annotated[
        pathlib.Path | None, typer.Option(help="the repository is kept here; else a temporary one")
    ] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Seconds from process start to ready, the first time (every task is read once, for its classes) and later; then
    queries for tasks at random, one after the other."""
    from checkpoints.source import load_backbone

    with contextlib.ExitStack() as stack:
        place = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        names = fill(place, tasks, load_backbone(MINILM[1]))
        options = [*MINILM, "--repository", str(place), "--cache-dir", cache, "--max-slots", str(slots)]
        figures: dict[str, Any] = {}
        with serve(options, timeout=3600) as server:
            figures["first start"] = {"seconds": server.seconds_to_ready, **_ask(server, names, queries, 0)}
        later = []
        for number in range(1, starts + 1):
            with serve(options, timeout=3600) as server:
                later.append({"seconds": server.seconds_to_ready, **_ask(server, names, queries, number)})
            console.log(f"start {number} of {starts}: {later[-1]}")
        figures["later starts"] = {name: statistics.median(each[name] for each in later) for name in later[0]}
        figures["later starts"]["slowest_query_seconds"] = max(each["slowest_query_seconds"] for each in later)
    settings = {"tasks": tasks, "queries": queries, "starts": starts, "slots": slots}
    report("registered", settings, figures, json_out)


def _ask(server: Served, names: Sequence[str], queries: int, seed: int) -> dict[str, float]:
    """Every answer must be right in kind; seconds of the median query, and of the slowest."""
    seconds = []
    for name in np.random.default_rng(seed).choice(names, queries):
        began = time.perf_counter()
        answer = server.client.post("/v1/classify", json={"model": str(name), "input": "a text of a few words"})
        seconds.append(time.perf_counter() - began)
        assert answer.status_code == 200 and answer.json()["data"][0]["num_classes"] == LABELS, answer.text
    metrics = server.metrics()
    return {
        "query_seconds": statistics.median(seconds),
        "slowest_query_seconds": max(seconds),
        "brought": metrics["jpets_tasks_brought_total"],
        "resident_bytes": metrics["process_resident_memory_bytes"],
    }
