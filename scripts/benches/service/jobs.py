"""``bench jobs``: latency of queries while the same machine trains a task."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer
from experiments.package_tasks import TASKS, Described, labelled, read_described
from served import ROOT, Served, serve

from benches.service.serving import Loaded, compiled, json_body, load, pooled, run_client, times_as_long
from benches.shared import console, report, warm_up

PACKAGES = ROOT / "tests" / "data" / "debian_packages.jsonl.gz"
TRAINED = "role"
"""The demo task whose texts the job trains on."""
ASKED = ("topic", "role", "toolkit", "ecosystem", "language")
CLASSIFY = "/v1/classify"
ENDLESS = 1000
"""Epochs of a job that is cancelled when the measurement is over."""


def jobs(
    method: str = "lora",
    rates: Annotated[str, typer.Option(help="requests a second to the demo tasks")] = "10,30",
    seconds: Annotated[float, typer.Option(help="length of each measurement")] = 10.0,
    rounds: Annotated[int, typer.Option(help="each alone and beside a job; p99s are of all requests")] = 10,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """p50 and p99 of single texts to five demo tasks (Poisson, HTTP), with nothing else running and beside a job."""
    packages = read_described(PACKAGES)
    bodies = [json_body(model=ASKED[at % len(ASKED)], input=own.text) for at, own in enumerate(packages)]
    steps = [float(rate) for rate in rates.split(",")]
    found: dict[float, dict[str, list[Loaded]]] = {rate: {"alone": [], "beside": []} for rate in steps}
    with tempfile.TemporaryDirectory(prefix="jpets-bench-") as folder:
        texts = pathlib.Path(folder) / "texts.jsonl"
        texts.write_text(_lines(packages))
        with serve(["--demo", "--repository", f"{folder}/tasks", "--cache-dir", f"{folder}/cache"]) as server:

            def ask(rate: float, seed: int) -> Loaded:
                return run_client(load(server.url + CLASSIFY, rate, seconds, bodies, seed))

            def pass_over(seed: int) -> None:
                for rate in steps:
                    ask(rate, seed)
                server.settle()

            server.settle()
            warm_up("server", pass_over, partial(compiled, server))
            for number in range(rounds):
                alone = {rate: ask(rate, number) for rate in steps}
                with _training(server, method, texts):
                    beside = {rate: ask(rate, number) for rate in steps}
                for rate in steps:
                    found[rate]["alone"].append(alone[rate])
                    found[rate]["beside"].append(beside[rate])
                    console.log(
                        f"round {number + 1}, {rate:g}/s: p99 {alone[rate].quantile(99) * 1e3:.0f} ms alone, "
                        f"{beside[rate].quantile(99) * 1e3:.0f} ms beside a job"
                    )
    figures = {f"{rate:g}/s": _figures(own["alone"], own["beside"]) for rate, own in found.items()}
    report("jobs", {"method": method, "seconds": seconds, "rounds": rounds}, figures, json_out)


def _lines(packages: list[Described]) -> str:
    examples = [own for side, own in labelled(packages, TASKS[TRAINED]) if side == "train"]
    return "".join(json.dumps({"text": own.text, "label": own.label}) + "\n" for own in examples)


@contextlib.contextmanager
def _training(server: Served, method: str, texts: pathlib.Path) -> Iterator[None]:
    """Yields while a job trains; the job is cancelled in the end."""
    asked: dict[str, str | int] = {
        "task": "trained-beside",
        "method": method,
        "epochs": ENDLESS,
        "max_length": 40,
        "format": "jsonl",
    }
    answer = server.client.post("/v1/jobs", params=asked, content=texts.read_bytes())
    answer.raise_for_status()
    path = f"/v1/jobs/{answer.json()['id']}"
    try:
        while not (state := server.client.get(path).json())["progress"]:
            if state["state"] not in ("queued", "running"):
                raise RuntimeError(f"the job ended: {state['problem']}")
            time.sleep(0.1)
        yield
    finally:
        server.client.delete(path).raise_for_status()
        while server.client.get(path).json()["state"] in ("queued", "running"):
            time.sleep(0.1)


def _figures(alone: list[Loaded], beside: list[Loaded]) -> dict[str, Any]:
    one, other = pooled(alone), pooled(beside)
    return {
        "requests": len(one.latencies),
        **{f"p{p} alone": one.quantile(p) for p in (50, 99)},
        **{f"p{p} beside": other.quantile(p) for p in (50, 99)},
        **{f"p{p} ratio": times_as_long(other.quantile(p), one.quantile(p)) for p in (50, 99)},
        "p99 ratios": [times_as_long(b.quantile(99), a.quantile(99)) for a, b in zip(alone, beside, strict=True)],
    }
