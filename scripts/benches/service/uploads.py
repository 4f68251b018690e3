"""``bench uploads``: how fast many task files are stored, in a repository and through a server."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import typer
from served import MINILM, ROOT, serve

from benches.service.registered import small_task
from benches.shared import console, report
from jpets.types import LoadedBackbone


def uploads(
    tasks: Annotated[int, typer.Option(help="files of one command")] = 1000,
    rounds: Annotated[int, typer.Option(help="commands of each kind, in turns; their medians count")] = 5,
    slots: int = 255,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Files a second of ``jpets task add FOLDER``, from the command's start to its end: into a repository's folder, and
    through a server, which also loads them. The files are small, new ones, and no two are alike."""
    from checkpoints.source import load_backbone  # machines that only measure engines lack what it needs

    backbone = load_backbone(MINILM[1])
    found: dict[str, list[float]] = {"repository": [], "server": []}
    with contextlib.ExitStack() as stack:
        work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-bench-")))
        places = {"repository": work / "alone", "server": work / "served"}
        first = write_files(work / "first", 1, backbone, 0)[0].parent
        for place in places.values():  # a server starts with the classes of what is there
            _add(first, ["--repository", str(place)])
        options = ["--repository", str(places["server"]), "--cache-dir", str(work / "cache"), "--max-slots", str(slots)]
        server = stack.enter_context(serve([*MINILM, *options]))
        stores = {"repository": ["--repository", str(places["repository"])], "server": ["--server", server.url]}
        for number in range(1, rounds + 1):
            folder = write_files(work / f"round-{number}", tasks, backbone, number)[0].parent
            for name, store in stores.items():
                rate = tasks / _add(folder, store)
                console.log(f"{name}, round {number} of {rounds}: {rate:.0f}/s")
                found[name].append(rate)
    figures = {name: {"rate": statistics.median(rates), "rates": rates} for name, rates in found.items()}
    report("uploads", {"tasks": tasks, "rounds": rounds, "slots": slots}, figures, json_out)


def write_files(folder: pathlib.Path, count: int, backbone: LoadedBackbone, seed: int) -> list[pathlib.Path]:
    """Files of small tasks of one class; those of different seeds have other names and numbers."""
    from checkpoints.task_file import write_task

    folder.mkdir()
    files = [folder / f"task-{seed}-{number:06}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        write_task(small_task(file.stem, backbone, [seed, number], "lora"), file, "bfloat16")
    return files


def _add(folder: pathlib.Path, store: list[str]) -> float:
    """Seconds that the command takes."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "jpets", "task", "add", str(folder), *store]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began
