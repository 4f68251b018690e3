"""``jpets profile``: measures at once what a server measures while it serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpets.app.commands.options import check_output, engine_option
from jpets.app.commands.output import busy, print_table, reporting
from jpets.config import DType, EngineSettings
from jpets.errors import InvalidInput
from jpets.files import write_atomic

if TYPE_CHECKING:
    from jpets.engine.engine import Engine
    from jpets.scheduling.costs.measured_profile import CostProfile
    from jpets.types import Task

SHOWN = ([8], [32])
"""Rows and tokens of the shape whose delta costs are printed."""


def profile(
    backbone: Annotated[str, typer.Option(envvar="JPETS_BACKBONE", help="folder, installed package or hub id")],
    tasks: Annotated[
        list[Path] | None, typer.Argument(metavar="[TASK_FILES]...", exists=True, dir_okay=False, help="task files")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each program; the median counts")] = 7,
    dtype: Annotated[DType, engine_option("dtype", envvar="JPETS_DTYPE")] = EngineSettings.dtype,
    cache_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="folder of compiled programs and costs")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=32, help="tokens of the largest batch in the cost profile")] = 2048,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="draw alpha and beta into this PNG")] = None,
    output: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="also write the figures here")] = None,
) -> None:
    """Measure now what programs and deltas cost, and keep it where servers find it at their next start.

    A server does without: it begins with estimates, and measures while it serves. This command does all of it at once.

    The cost profile holds alpha, the shared part over rows and length, and beta, what each kind of delta adds.

    Costs hold for one device, number format and kind of delta: give the tasks that will be served.
    Without any, the standard shapes are measured, which a server with an empty repository makes room for.
    """
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.app.standard import standard_tasks
    from jpets.engine.engine import Engine
    from jpets.xla_flags import set_xla_flags

    if output is not None and not is_stream(output):
        check_output("--json", output)
    if plot is not None:
        from jpets.app.commands.profile.plot import draw_profile

        check_output("--plot", plot, (".png",))

    set_xla_flags()

    with busy("read backbone"):
        loaded = load_backbone(backbone)
        found = [read_task(file, config=loaded.config, backbone=loaded.fingerprint) for file in tasks or ()]
        _check_ids(found)
        reserve = [] if found else standard_tasks(loaded)
        settings = EngineSettings(dtype=dtype, background_compile=False)
        parts = [part for task in found for part in task.parts]
        engine = Engine(loaded, parts, settings, reserve=reserve, cache_dir=cache_dir)
    programs = measured(engine, repeats)
    found_profile = profiled(engine, max_tokens, repeats)
    print_table(
        ("bucket", "variant", "seconds", "tokens/s"),
        [(p["bucket"], p["variant"], f"{p['seconds']:.6f}", f"{p['tokens_per_second']:,.0f}") for p in programs],
        numbers=("seconds", "tokens/s"),
    )
    beta = [(name, f"{grid.at(*SHOWN)[0, 0]:.6f}") for name, grid in found_profile.beta.items()]
    print_table(("delta", "seconds for 8 rows x 32 tokens of a task"), beta, numbers=("seconds",))
    if output is not None:
        device = engine.replica.device
        document = {
            "backbone": loaded.name,
            "fingerprint": loaded.fingerprint,
            "device": f"{device.platform} {device.device_kind}",
            "dtype": dtype,
            "repeats": repeats,
            "programs": programs,
            "profile": json.loads(found_profile.to_json()),
        }
        text = json.dumps(document, indent=2) + "\n"
        output.write_text(text) if is_stream(output) else write_atomic(output.resolve(), text.encode())
    if plot is not None:
        draw_profile(found_profile, f"{loaded.name}, {dtype}, {engine.replica.device.device_kind}", plot)


def is_stream(path: Path) -> bool:
    """Whether a path is something like ``/dev/stdout``, which is written as it is."""
    given = path.absolute()
    return given.is_relative_to("/dev") or (given.exists() and not given.is_file() and not given.is_dir())


def measured(engine: Engine, repeats: int) -> list[dict[str, Any]]:
    """Compiles, measures and saves. Figures of the core programs, the smallest bucket first.

    The engine is started, which compiles, and closed: without its threads, this one may use the device.
    """
    from jpets.engine.costs.cost_table import measure

    replica = engine.replica
    with reporting() as report:
        with engine:
            engine.start(report)
        programs = sorted(replica.programs, key=lambda program: (program.key.bucket, str(program.key.variant)))
        figures = []
        for done, program in enumerate(programs):
            report("measure", done, len(programs))
            seconds = measure(replica, program, repeats)
            engine.costs.set(program.key, seconds)
            figures.append(
                {
                    "bucket": str(program.key.bucket),
                    "variant": str(program.key.variant),
                    "tokens": program.key.bucket.tokens,
                    "rows": program.key.bucket.rows,
                    "seconds": seconds,
                    "tokens_per_second": program.key.bucket.tokens / seconds,
                }
            )
        report("measure", len(programs), len(programs))
    engine.costs.save()
    return figures


def profiled(engine: Engine, max_tokens: int, repeats: int) -> CostProfile:
    """Measures the cost profile of an engine that is closed, and keeps it for the next one."""
    from jpets.engine.costs.profile_measurement import measure_figures

    replica = engine.replica
    with reporting() as report:
        found = measure_figures(engine.family, replica.mesh, max_tokens=max_tokens, rounds=repeats, progress=report)
    engine.profile.add(found)
    return engine.profile.current


def _check_ids(tasks: Sequence[Task]) -> None:
    """An engine would take a second task of an id as a new version of the first."""
    ids = [task.id for task in tasks]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise InvalidInput(f"two task files are named {twice!r}; their stems are their ids and must differ")
