"""``bench.py domains``: a server of very many tasks over the tables of several domains, and its host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Int
from served import Served, serve

from benches.service.registered import HastyBlobs
from benches.shared import LABELS, console, random_tasks, report
from jpets.app.host_use import process_bytes
from jpets.plot.ngrams import grams_of
from jpets.plot.table import BLOCK_BYTES, Table
from jpets.plot.tree import Tree, table_path
from jpets.types import LoadedBackbone, Task

ROWS = 64
"""Texts of a request."""
SIZES = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


def domains(
    folder: Annotated[pathlib.Path, typer.Argument(help="of jpets plot root")],
    tasks: int = 1000,
    methods: str = "adapter,lora,bitfit",
    background: Annotated[bool, typer.Option("--background/--no-background", help="compile further programs")] = False,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Every task is asked for texts of its domain, and every block of every table is read; the process's memory then,
    over what the server said at its start that it would be."""
    from checkpoints.native import PLOT, read_native

    backbone, tree = read_native(folder), Tree.read(folder / PLOT)
    with contextlib.ExitStack() as stack:
        place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = _stored(place / "tasks", backbone, methods.split(","), tasks, sorted(tree.domains))
        options = ["--backbone", str(folder), "--repository", str(place / "tasks"), "--cache-dir", str(place / "cache")]
        options += ["--reserve", "never", "--max-queue", "65536"]
        if not background:
            options.append("--no-background-compile")
        said = place / "said"
        server = stack.enter_context(serve(options, timeout=3600, said=said))
        announced = _announced(said)
        began, before = time.perf_counter(), _memory(server.pid)
        console.log(f"ready after {server.seconds_to_ready:.0f} s: {announced}")
        count = sum(_ask(server, task, rows) for task, rows in _questions(folder / PLOT, tree, made))
        seconds, after = time.perf_counter() - began, _memory(server.pid)
        listed = server.client.get("/v1/domains").json()["domains"]
        metrics = server.metrics()
    total = announced["total"]
    figures: dict[str, Any] = {
        "memory": {"before": before, "after": after, "announced": total, "ratio": after / total},
        "traffic": {"texts": count, "seconds": seconds, "ready": server.seconds_to_ready},
        "tables": {"entries": sum(own["entries"] for own in listed), "bytes": sum(own["bytes"] for own in listed)},
        "tasks": {"brought": metrics["jpets_tasks_brought_total"], "repository": tasks},
    }
    settings = {"tasks": tasks, "domains": len(tree.domains), "methods": methods, "background": background}
    report("domains", settings, figures, json_out)


def _stored(
    folder: pathlib.Path, backbone: LoadedBackbone, methods: Sequence[str], count: int, names: Sequence[str]
) -> list[Task]:
    """Tasks in a repository, over the domains in turn."""
    from checkpoints.repository import Repository
    from checkpoints.task_file import task_to_bytes

    assert backbone.tables is not None
    repository = Repository(folder, blobs=HastyBlobs(folder / "blobs"))
    made = []
    for task, name in zip(random_tasks(backbone, methods, count), itertools.cycle(names)):
        rule = dataclasses.replace(task.preprocessing, domain=backbone.tables.full_name(name))
        made.append(dataclasses.replace(task, preprocessing=rule))
        repository.put(task.id, task_to_bytes(made[-1], "bfloat16"))
    repository.close()
    return made


def _questions(plot: pathlib.Path, tree: Tree, tasks: Sequence[Task]) -> Iterator[tuple[str, Int[np.ndarray, "n l"]]]:
    """(task, rows of token ids, -1 behind their ends): every task once, and of every table an n-gram of each block."""
    of_domain: dict[str, list[str]] = {name: [] for name in tree.domains}
    for task in tasks:
        of_domain[str(task.preprocessing.domain).partition("@")[0]].append(task.id)
    chosen = {name: _of_each_block(plot, tree, name) for name in ("", *tree.domains)}
    for name, ids in of_domain.items():
        asked = np.concatenate([chosen[name], chosen[""]])
        for number, id in enumerate(ids):
            yield id, asked[number :: len(ids)]


def _of_each_block(plot: pathlib.Path, tree: Tree, name: str) -> Int[np.ndarray, "k n"]:
    """N-grams as rows: their tokens, without those that are missing."""
    branch = tree.domains[name] if name else tree.root
    table = Table(table_path(plot, branch), tree.info(branch))
    grams = grams_of(table.keys[:: max(1, BLOCK_BYTES // table.info.row_bytes // 2)], tree.window.size) - 1
    order = np.argsort(grams < 0, axis=1, kind="stable")
    return np.take_along_axis(grams, order, axis=1)


def _ask(server: Served, task: str, rows: Int[np.ndarray, "n l"]) -> int:
    """Asks a task; every answer must be right in kind."""
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        inputs = [
            {"name": name, "datatype": "INT64", "shape": list(part.shape), "data": data.ravel().tolist()}
            for name, data in (("input_ids", np.maximum(part, 0)), ("attention_mask", (part >= 0).astype(np.int64)))
        ]
        answer = server.client.post(f"/v2/models/{task}/infer", json={"inputs": inputs})
        assert answer.status_code == 200, answer.text
        found = {out["name"]: out for out in answer.json()["outputs"]}
        assert found["logits"]["shape"] == [len(part), LABELS] and np.isfinite(found["logits"]["data"]).all()
    return len(rows)


def _announced(said: pathlib.Path) -> dict[str, float]:
    """Bytes that the server says it takes now, and will take when all is in use."""
    end = time.monotonic() + 60
    while (found := re.search(r"host memory: (\S+ \S+) now(?:, (\S+ \S+) when)?", said.read_text())) is None:
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.2)
    now, total = found.groups()
    return {"now": _bytes(now), "total": _bytes(total or now)}


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * SIZES[unit]


def _memory(process: int) -> int:
    found = process_bytes(pathlib.Path(f"/proc/{process}"))
    assert found is not None
    return found
