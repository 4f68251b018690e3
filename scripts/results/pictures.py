"""The picture of each benchmark."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from results.documents import Document
from results.engine_pictures import (
    draw_breakdown,
    draw_capacity,
    draw_curve,
    draw_memory,
    draw_operators,
    draw_runtimes,
    draw_throughput,
)
from results.scheduling_pictures import draw_batching, draw_interval, draw_migration, draw_spread
from results.service_pictures import draw_growth, draw_serving, draw_tasks

Draw = Callable[[Sequence[Document]], None]
DRAWN: Mapping[str, Draw] = {
    "batching": draw_batching,
    "serving": draw_serving,
    "operators": draw_operators,
    "capacity": draw_capacity,
    "memory": draw_memory,
    "throughput": draw_throughput,
    "breakdown": draw_breakdown,
    "migration": draw_migration,
    "interval": draw_interval,
    "debian-tasks": draw_tasks,
    "curve": draw_curve,
    "runtimes": draw_runtimes,
    "spread": draw_spread,
    "growth": draw_growth,
}


def save_picture(draw: Draw, found: Sequence[Document], path: pathlib.Path) -> pathlib.Path:
    draw(found)
    pyplot.savefig(path, dpi=130)
    pyplot.close()
    return path
