"""What the benchmarks share: random backbones and tasks, interleaved timing, paired ratios, the report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jpets.config import NAMED_BACKBONES, BackboneConfig
from jpets.deltas import METHODS
from jpets.deltas.operators import usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.kernels.choice import SUFFIX
from jpets.engine.programs.program import Family
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.model.encoder import Params, random_params
from jpets.types import BY_MEAN, BackboneRef, EmbeddingRule, Head, LoadedBackbone, Query, Result, RowSource, Task

CHOICES = "JPETS_BENCH_CHOICES"
console = Console(stderr=True)

LABELS = 4
NO_SLOTS: Mapping[ClassKey, int] = MappingProxyType({})
MOST_WARM_UPS = 5
WIDEST = 2000
"""Columns of letters that a table in a file may take."""


@dataclasses.dataclass(frozen=True)
class RandomBackbone:
    """A randomly initialised backbone of a named size, queried by token ids."""

    name: str
    config: BackboneConfig
    params: Params
    tokenizer_json: str = (
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[PAD]": 0}, "unk_token": "[PAD]"}}'
    )
    fingerprint: str = f"sha256:{0:064}"
    embeds: EmbeddingRule = BY_MEAN
    kind: str = "encoder"
    tables: RowSource | None = None


@contextlib.contextmanager
def engine_cache() -> Iterator[pathlib.Path]:
    """A cache folder for one run. With ``CHOICES`` set to a folder, runs share what trials of kernels found on this
    device: a GPU's trials take a minute, and a program of the usual candidates is not what a server runs."""
    kept = os.environ.get(CHOICES)
    with tempfile.TemporaryDirectory(prefix="jpets-bench-") as name:
        folder = pathlib.Path(name)
        if kept is None:
            yield folder
            return
        (folder / "costs").mkdir()
        pathlib.Path(kept).mkdir(parents=True, exist_ok=True)
        for path in pathlib.Path(kept).glob(f"*{SUFFIX}"):
            shutil.copy(path, folder / "costs")
        try:
            yield folder
        finally:
            for path in (folder / "costs").glob(f"*{SUFFIX}"):
                shutil.copy(path, kept)


def usual_family(config: BackboneConfig, slots: Mapping[ClassKey, int] = NO_SLOTS, *, chained: bool = False) -> Family:
    """Programs in bf16 with the operators that an engine has here before it tries any, for what a bench puts beside
    an engine."""
    banks = tuple(sorted(slots.items()))
    return Family(
        EncoderNetwork(config), "bfloat16", banks, operators=usual_operators(jax.default_backend()), chained=chained
    )


def named_backbone(name: str) -> BackboneConfig:
    if name not in NAMED_BACKBONES:
        raise typer.BadParameter(f"expected one of {', '.join(NAMED_BACKBONES)} as backbone, found {name}")
    return NAMED_BACKBONES[name]


def random_backbone(name: str) -> RandomBackbone:
    config = named_backbone(name)
    return RandomBackbone(name, config, jax.tree.map(np.asarray, random_params(config)))


def random_tasks(
    backbone: LoadedBackbone, methods: Sequence[str], count: int, layers: Sequence[int] | None = None
) -> list[Task]:
    """``count`` tasks that take the methods in turn, each with a head of its own; their deltas are in ``layers``, by
    default in all."""
    rng, config = np.random.default_rng(0), backbone.config
    ref = BackboneRef.of(backbone)
    tasks = []
    for i in range(count):
        method = methods[i % len(methods)]
        own = METHODS[method].usual if layers is None else {**METHODS[method].usual, "layers": list(layers)}
        delta = METHODS[method].init(rng, own, config, 0.02)
        kernel = rng.standard_normal((config.hidden_size, LABELS), np.float32) * 0.02
        head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(LABELS, np.float32)})
        tasks.append(Task(f"{method}-{i}", ref, (delta,), head, tuple("abcd")))
    return tasks


def draw_lengths(count: int, mean: int, std: float, longest: int) -> list[int]:
    drawn = np.random.default_rng(1).normal(mean, std, count) if std else np.full(count, mean)
    return [int(n) for n in np.clip(np.rint(drawn), 3, longest)]


def interleave(systems: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each system; every system runs once unmeasured first."""
    for run in systems.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


class Answering(Protocol):
    """An engine, or what stands for one."""

    def infer(self, queries: Sequence[Query], /) -> Sequence[Result]: ...


def answers(engine: Answering, queries: Sequence[Query]) -> Sequence[Result]:
    """Raises the first error: a query that fails takes less time than an answer, and must not be timed as one."""
    found = engine.infer(queries)
    for result in found:
        if result.error is not None:
            raise result.error
    return found


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times as fast as ``other`` is ``base``: median of the paired ratios and its 95 % interval."""
    ratios = np.array(other) / np.array(base)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def warm_up(name: str, pass_over: Callable[[int], None], compiled: Callable[[], float]) -> None:
    """Passes that do not count, until one misses no program: compiling takes the cores that are measured.

    ``pass_over`` gets the pass's number and returns when nothing compiles any more; ``compiled`` counts programs.
    """
    for number in range(MOST_WARM_UPS):
        before = compiled()
        pass_over(number)
        if compiled() == before:
            return
    console.log(f"{name}: programs were still missed after {MOST_WARM_UPS} passes")


def machine() -> dict[str, Any]:
    info = pathlib.Path("/proc/cpuinfo")
    model = platform.processor()
    if info.exists():
        model = next(
            (x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), model
        )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
    }


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")} | {
        "python": platform.python_version()
    }


def commit() -> str | None:
    """The checkout's commit, with a plus where tracked files differ from it, but for results; None outside a
    repository."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    try:
        own = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":/", ":(exclude,top)docs"]).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return own.stdout.strip() + ("+" if changed else "")


COMMIT = commit()
"""When the process began."""


def command() -> str:
    """How this process was called, at the checkout's root. The file that is written is FILE, and a path outside the
    checkout has its option's name."""
    root, given = pathlib.Path(__file__).parents[2], list[str]()
    for before, own in itertools.pairwise(sys.argv):
        path = pathlib.Path(own)
        if before == "--json":
            given.append("FILE")
        elif path.is_absolute():
            given.append(str(path.relative_to(root)) if path.is_relative_to(root) else before.lstrip("-").upper())
        else:
            given.append(own)
    spec = sys.modules["__main__"].__spec__
    started = "python scripts/bench.py" if spec is None else f"PYTHONPATH=scripts python -m {spec.name}"
    return f"{started} {shlex.join(given)}"


def report(name: str, settings: Mapping[str, Any], systems: Mapping[str, Any], out: pathlib.Path | None) -> None:
    document = {
        "name": name,
        "commit": COMMIT,
        "command": command(),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "systems": systems,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    show_table(name, systems)


def show_table(name: str, systems: Mapping[str, Any]) -> None:
    """Prints a line a system, or a line a figure where there are more of these; in a file whole, however wide."""
    kinds = list(dict.fromkeys(kind for figures in systems.values() for kind in figures))
    lines = [[system, *(_show(own.get(kind)) for kind in kinds)] for system, own in systems.items()]
    cells = [["system", *kinds], *lines]
    if len(kinds) > len(systems):
        cells = [list(line) for line in zip(*cells, strict=True)]
    table = Table(*cells[0], title=name)
    for line in cells[1:]:
        table.add_row(*line)
    screen = Console()
    whole = screen.measure(table, options=screen.options.update(width=WIDEST)).maximum
    Console(width=screen.width if screen.is_terminal else whole).print(table)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} points"
    if isinstance(value, Mapping) and "median" not in value:
        return ", ".join(f"{name} {_show(own)}" for name, own in value.items())
    if isinstance(value, Mapping):
        return f"{value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value:.2f}" if isinstance(value, float) else str(value if value is not None else "")
