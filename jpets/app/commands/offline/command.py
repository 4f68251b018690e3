"""``jpets run``: many texts by many tasks, without a server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import rich.progress
import rich.text
import typer

from jpets.app.commands.options import engine_option
from jpets.app.commands.output import busy, progress_bars, reporting
from jpets.config import DType, EngineSettings, SizingRule

if TYPE_CHECKING:
    from checkpoints.backbone import Backbone
    from jpets.app.commands.offline.input import Contents
    from jpets.app.commands.offline.output import Output
    from jpets.app.commands.offline.tasks import TaskSet
    from jpets.engine.interface import Serves

STDIO = Path("-")


def run(
    place: Annotated[
        Path, typer.Argument(metavar="TASKS", exists=True, help="task file, folder of task files, or repository")
    ],
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="lines to answer; - is standard input")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", dir_okay=False, help="lines of answers; - is standard output"),
    ],
    backbone: Annotated[str, typer.Option(envvar="JPETS_BACKBONE", help="folder, installed package or hub id")],
    resume: Annotated[bool, typer.Option("--resume", help="go on with an OUT that was left unfinished")] = False,
    top_k: Annotated[int | None, typer.Option(min=1, help="add the best labels with their probabilities")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="cut long texts, whatever a task's own rule")] = False,
    tenant: Annotated[str | None, typer.Option(help="of a repository: its tasks beside those that all share")] = None,
    dtype: Annotated[DType, engine_option("dtype", envvar="JPETS_DTYPE")] = EngineSettings.dtype,
    max_batch_tokens: Annotated[int, typer.Option(min=64, help="most tokens in a batch")] = 1024,
    cache_dir: Annotated[Path | None, typer.Option(file_okay=False, help="folder of compiled programs")] = None,
) -> None:
    """Score many texts by many tasks, offline. Exit code 1 where a line could not be answered.

    Each line of the input is a JSON object: {"task": ID, "text": "...", "text_pair": "...", "prompt_name": "...",
    "id": ANYTHING}; only text has to be there. A null task is the plain backbone, which embeds. A list of ids asks each
    of them, a line without "task" asks every task; the answer is then in "results", by id.

    Each line of the output answers one of the input, in order: {"line": NUMBER, "id": ..., ANSWER} with the fields of
    POST /v1/classify, or "error" in their place: a line that is wrong stops nothing.

    An answer does not depend on the lines around it, so a run that was killed and goes on with --resume gives the same
    file. OUT.run.json beside OUT says what made it.
    """
    from checkpoints.source import load_backbone
    from jpets.app.commands.offline.input import contents
    from jpets.app.commands.offline.output import open_output
    from jpets.app.commands.offline.tasks import load_tasks

    if source != STDIO and (source.is_dir() or not source.exists()):
        raise typer.BadParameter(f"there is no file {source}")
    whole = contents(source) if source.is_file() else None
    if resume and (whole is None or output == STDIO):
        raise typer.BadParameter("--resume needs files, not standard input or output")
    with busy("read backbone and tasks"):
        loaded = load_backbone(backbone)
        found = load_tasks(place, loaded, tenant)
    record = {
        "input": whole.digest if whole is not None else None,
        "backbone": loaded.fingerprint,
        "tasks": dict(found.digests),
        "dtype": dtype,
        "max_batch_tokens": max_batch_tokens,
        "top_k": top_k,
        "truncate": truncate,
    }
    with open_output(None if output == STDIO else output, record, resume=resume) as out:
        start, before = time.monotonic(), out.lines
        if whole is None or out.lines < whole.lines:
            with _engine(loaded, found, dtype, max_batch_tokens, cache_dir) as engine, _opened(source) as lines:
                start = time.monotonic()
                _score(engine, found, lines, out, whole, top_k=top_k, truncate=truncate)
        seconds = time.monotonic() - start
    rate = (out.lines - before) / seconds if out.lines > before else 0.0
    kept = f"{before} were there, " if before else ""
    typer.echo(f"{out.lines} lines, {out.failed} failed; {kept}{seconds:.1f} s, {rate:,.0f} lines/s", err=True)
    if out.failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _engine(
    backbone: Backbone, found: TaskSet, dtype: DType, max_batch_tokens: int, cache_dir: Path | None
) -> Iterator[Serves]:
    """A started engine whose answers depend on nothing but their queries."""
    from jpets.app.commands.offline.scoring import IN_FLIGHT
    from jpets.engine.batch.bucket import steady_menu
    from jpets.engine.students.serving import StudentServing
    from jpets.xla_flags import set_xla_flags

    set_xla_flags()
    most = max(len(task.parts) for task in found.tasks.values())
    settings = EngineSettings(
        dtype=dtype,
        policy="steady",
        background_compile=False,
        max_batch_tokens=max_batch_tokens,
        max_queue=most * (IN_FLIGHT + len(found.tasks)),
    )
    menu = steady_menu(min(settings.max_length, backbone.config.max_positions), max_batch_tokens)
    with StudentServing.of_tasks(
        backbone, found.tasks.values(), settings, cache_dir=cache_dir, buckets=menu, rule=SizingRule(fixed=True)
    ) as engine:
        with reporting() as report:
            engine.start(report)
        yield engine


def _score(engine: Serves, found: TaskSet, lines: BinaryIO, out: Output, whole: Contents | None, **how: Any) -> None:
    from jpets.app.commands.offline.input import asked
    from jpets.app.commands.offline.scoring import Scorer

    answers = Scorer(engine, **how).answers(asked(lines, tuple(found.tasks), skip=out.lines))
    with progress_bars(rich.progress.MofNCompleteColumn(), Rate()) as bars:
        bar = bars.add_task("lines", total=whole.lines if whole is not None else None, completed=out.lines)
        for document in answers:
            out.write(document)
            bars.update(bar, completed=out.lines)


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    if source == STDIO:
        yield sys.stdin.buffer
    else:
        with source.open("rb") as file:
            yield file


class Rate(rich.progress.ProgressColumn):
    """Lines a second."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        speed = task.finished_speed or task.speed
        return rich.text.Text("" if speed is None else f"{speed:,.0f} lines/s")
