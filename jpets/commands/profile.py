"""``jpets profile``: measures what every core program costs, for an engine's next start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jpets.commands.output import busy, print_table, reporting
from jpets.config import DType, EngineSettings
from jpets.errors import InvalidInput

if TYPE_CHECKING:
    from jpets.engine.engine import Engine
    from jpets.types import Task

DTYPES = ("bfloat16", "float32")


def profile(
    backbone: Annotated[str, typer.Option(envvar="JPETS_BACKBONE", help="folder, installed package or hub id")],
    tasks: Annotated[
        list[Path] | None, typer.Argument(metavar="[TASK_FILES]...", exists=True, dir_okay=False, help="task files")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each program; the median counts")] = 9,
    dtype: Annotated[str, typer.Option(envvar="JPETS_DTYPE", help="bfloat16 or float32")] = "bfloat16",
    cache_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="folder of compiled programs and costs")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="also write the figures here")] = None,
) -> None:
    """Measure the core programs, and keep the costs where the engine finds them at its next start.

    Costs hold for one device, number format and set of delta shapes: give the tasks that the engine will serve.
    Without any, the standard shapes are measured, which a server with an empty repository makes room for.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.engine.engine import Engine
    from jpets.engine.xla_flags import set_xla_flags
    from jpets.standard import standard_tasks

    set_xla_flags()

    with busy("read backbone"):
        loaded = load_backbone(backbone)
        found = [read_task(file, config=loaded.config, backbone=loaded.fingerprint) for file in tasks or ()]
        _check_ids(found)
        reserve = [] if found else standard_tasks(loaded)
        settings = EngineSettings(dtype=cast(DType, dtype), background_compile=False)
        engine = Engine(loaded, found, settings, reserve=reserve, cache_dir=cache_dir)
    programs = measured(engine, repeats)
    print_table(
        ("bucket", "variant", "seconds", "tokens/s"),
        [(p["bucket"], p["variant"], f"{p['seconds']:.6f}", f"{p['tokens_per_second']:,.0f}") for p in programs],
        numbers=("seconds", "tokens/s"),
    )
    if output is not None:
        device = engine.replicas[0].device
        document = {
            "backbone": loaded.name,
            "fingerprint": loaded.fingerprint,
            "device": f"{device.platform} {device.device_kind}",
            "dtype": dtype,
            "repeats": repeats,
            "programs": programs,
        }
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def measured(engine: Engine, repeats: int) -> list[dict[str, Any]]:
    """Compiles, measures and saves. Figures of the core programs, the smallest bucket first.

    The engine is started, which compiles, and closed: without its threads, this one may use the device.
    """
    from jpets.engine.profile import measure

    (replica,) = engine.replicas
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


def _check_ids(tasks: Sequence[Task]) -> None:
    """An engine would take a second task of an id as a new version of the first."""
    ids = [task.id for task in tasks]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise InvalidInput(f"two task files are named {twice!r}; their stems are their ids and must differ")
