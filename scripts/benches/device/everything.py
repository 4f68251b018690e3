"""Every benchmark and kernel test that needs a device, one process each, within a time limit.

Results are kept under ``docs/results/<device>/`` by name; what is there is not run again, so a second call goes on
where the first one ended. What was stopped for lack of time comes last from then on. Runs from a bare checkout
(``scripts/bench_gpu``), on a CPU with smaller shapes. Where ``OUT`` names a folder, as on machines of which only that
comes back, all results and logs are there too after each step, as ``results.tar.gz``.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

CHOICES = "JPETS_BENCH_CHOICES"
"""The variable that ``benches.shared.engine_cache`` reads: measurements share what trials of kernels found."""
ROOT = pathlib.Path(__file__).parents[3]
LEAST_SECONDS = 20.0
"""No measurement begins with less time left."""
PARALLEL = ("-n", "4", "--dist", "loadfile", "-p", "no:benchmark")
"""How tests run; that plugin warns of company, and a warning is an error."""
ON_GPU = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables of tests there: by default they run on the CPU, and each process would take most of the memory."""
RAN = (0, 1)
"""What pytest returns where all tests ran, whether some failed or not."""
STOPPED = ".stopped"
"""Beside a result's name: what had no end in the time that was left."""
SHOWN = ("qps", "tasks", "new_mb", "backbone_of_dense", "loops", "shared_scatters", "reference_ratio", "ratio")
FIND_DEVICE = "import jax; d = jax.local_devices()[0]; print(d.platform, d.device_kind)"
"""In a process of its own: one that holds a GPU leaves no memory for others."""
console = Console()


class Measurement(NamedTuple):
    """A benchmark and its options, by the name of its result; or the tests in a folder."""

    name: str
    arguments: Sequence[str]
    tests: bool = False


FIVE = "adapter,lora,bitfit,mask,diff"
ALL = "adapter,lora,bitfit,mask,diff,ia3,onebit,prefix,prompt"
WIDE = ("--tasks", "128", "--length", "128")
POLICIES = "fixed,alpha,packed,auto"
GPU = (
    Measurement("kernel-tests", ("tests/kernels", "tests/engine/kernels"), tests=True),
    Measurement("kernel-choice-32x32", ("choice",)),
    Measurement("kernel-choice-128x128", ("choice", "--tasks", "128", "--length", "128")),
    Measurement("kernels-bert-base", ("kernels",)),
    Measurement("trace-128x128", ("trace",)),
    Measurement("trace-32x32", ("trace", "--tasks", "32", "--length", "32", "--methods", FIVE)),
    Measurement("throughput-128x128", ("throughput", *WIDE, "--systems", "pets,backbone")),
    Measurement("throughput-128x128-all", ("throughput", *WIDE, "--methods", ALL, "--systems", "pets,backbone")),
    Measurement("breakdown-128x128", ("breakdown", *WIDE)),
    Measurement("throughput-light", ("throughput", "--methods", "adapter,lora,bitfit", "--systems", "pets,backbone")),
    Measurement("throughput-all", ("throughput", "--methods", ALL, "--systems", "pets,backbone")),
    Measurement("throughput-32x32", ("throughput", "--systems", "pets,seqs,pars,stacked,backbone")),
    Measurement("capacity-bert-base", ("capacity", "--check-gb", "32")),
    Measurement("memory-bert-base", ("memory",)),
    Measurement("operators-32x32", ("operators", "--rows", "128", "--length", "32")),
    Measurement("operators-128x4", ("operators", "--tasks", "128", "--rows", "128", "--length", "4")),
    Measurement("curve-bert-base", ("curve", "--tasks", "16,32,64,128", "--shapes", "1x32,1x128", "--systems", "pets")),
    Measurement("runtimes-bert-base", ("runtimes", "--warm-up", "20")),
    Measurement("paging-bert-base", ("paging", "--backbone", "bert-base", "--tasks", "1500", "--slots", "127")),
    Measurement("layerwise-bert-base", ("layerwise",)),
    Measurement("students-minilm", ("students", "--warm-up", "30", "--rounds", "5", "--day", "30", "--idle", "10")),
    Measurement("hierarchical-bert-base", ("hierarchical",)),
    Measurement(
        "batching-bert-base",
        ("batching", "--backbone", "bert-base", "--queries", "256", "--policies", POLICIES),
    ),
)
CPU = (
    Measurement("kernel-tests", ("tests/kernels", "tests/engine/kernels"), tests=True),
    Measurement("programs-cuda", ("programs", "--platform", "cuda")),
    Measurement("programs-hopper", ("programs", "--candidates", "mosaic", "--capability", "9.0")),
    Measurement("throughput-light", ("throughput", "--methods", "adapter,lora,bitfit", "--systems", "pets,backbone")),
    Measurement("throughput-32x32", ("throughput", "--systems", "pets,seqs,pars,stacked,backbone", "--rounds", "9")),
    Measurement("breakdown-32x32", ("breakdown", "--rounds", "9")),
    Measurement("capacity-bert-base", ("capacity",)),
    Measurement("memory-bert-base", ("memory",)),
)


def find_device() -> tuple[str, str]:
    """(platform, name for a folder)."""
    found = subprocess.run([sys.executable, "-c", FIND_DEVICE], capture_output=True, text=True, check=True)
    platform, _, kind = found.stdout.strip().partition(" ")
    if platform == "cpu":
        return platform, f"cpu-{os.cpu_count()}core"
    return platform, re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def command(step: Measurement, result: pathlib.Path) -> list[str]:
    if step.tests:
        return [sys.executable, "-m", "pytest", *PARALLEL, *step.arguments]
    return [sys.executable, "scripts/bench.py", *step.arguments, "--json", str(result)]


def run(step: Measurement, result: pathlib.Path, seconds: float, platform: str) -> str:
    """What became of the measurement, in words. Tests leave a result too, so that they are not run again; where some
    failed, their log stays beside it."""
    env = os.environ | (ON_GPU if step.tests and platform != "cpu" else {})
    start = time.monotonic()
    log, stopped = result.with_suffix(".log"), result.with_suffix(STOPPED)
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command(step, result), cwd=ROOT, stdout=output, stderr=output, timeout=seconds, env=env
            )
        except subprocess.TimeoutExpired:
            stopped.touch()
            return f"stopped after {seconds:.0f} s, see {log.name}"
    stopped.unlink(missing_ok=True)
    took = f"{time.monotonic() - start:.0f} s"
    if step.tests and done.returncode in RAN:
        summary = log.read_text().strip().splitlines()[-1]
        result.write_text(json.dumps({"name": step.name, "summary": summary}) + "\n")
    if done.returncode:
        return f"failed after {took}, see {log.name}"
    log.unlink()
    return took


def shown(result: pathlib.Path) -> str:
    """The figures of a result that fit a line."""
    document = json.loads(result.read_text())
    if "summary" in document:
        return str(document["summary"])
    parts = []
    for system, figures in document["systems"].items():
        known = [f"{figures[key]:.4g} {key}" for key in SHOWN if key in figures]
        ratio = figures.get("pets_ratio")
        parts.append(f"{system} {', '.join(known)}" + (f" (jpets {ratio['median']:.3f} x)" if ratio else ""))
    return "; ".join(parts)


def bring_back(folder: pathlib.Path) -> None:
    """One file of all results so far: the next step may end the machine."""
    if place := os.environ.get("OUT"):
        shutil.make_archive(str(pathlib.Path(place) / "results"), "gztar", folder)


def main(
    only: Annotated[list[str] | None, typer.Option(help="run these alone, also if their result is there")] = None,
    minutes: Annotated[float, typer.Option(help="time for everything")] = 9.0,
    out: Annotated[pathlib.Path | None, typer.Option(help="folder of the results")] = None,
) -> None:
    """Run what has no result yet, the most wanted first, and print a short table."""
    end = time.monotonic() + 60 * minutes
    platform, name = find_device()
    steps = CPU if platform == "cpu" else GPU
    unknown = set(only or ()) - {step.name for step in steps}
    if unknown:
        raise typer.BadParameter(f"unknown {sorted(unknown)}; there are {[step.name for step in steps]}")
    folder = out or ROOT / "docs" / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    if CHOICES not in os.environ:
        os.environ[CHOICES] = tempfile.mkdtemp(prefix="jpets-choices-")
    table = Table("benchmark", "ran", "figures", title=name)
    for step in sorted(steps, key=lambda step: (folder / f"{step.name}{STOPPED}").exists()):
        result = folder / f"{step.name}.json"
        if (only and step.name not in only) or (not only and result.exists()):
            state = "kept" if result.exists() else "not asked for"
        elif (left := end - time.monotonic()) < LEAST_SECONDS:
            state = "no time left: call again"
        else:
            console.log(step.name)
            state = run(step, result, left, platform)
            bring_back(folder)
        table.add_row(step.name, state, shown(result) if result.exists() else "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
