"""A cost profile as a picture: alpha, the shared part, and beta, each kind of delta, over rows and length."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jpets.errors import InvalidInput
from jpets.scheduling.costs.measured_profile import CostProfile, Grid

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
except ImportError as error:
    raise InvalidInput("--plot needs matplotlib: pip install matplotlib") from error

COLUMNS = 3
FAINT = 1e-6
"""Seconds below which a cost is drawn as this."""


def draw_profile(profile: CostProfile, title: str, path: Path) -> None:
    """One panel for alpha and one for each delta kind, milliseconds as colour and in the cells."""
    panels = [
        ("alpha: shared part", profile.alpha),
        *((f"beta: {_brief(name)}", g) for name, g in profile.beta.items()),
    ]
    rows = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(5.2 * COLUMNS, 4.2 * rows), squeeze=False, layout="constrained"
    )
    for axis, (name, grid) in zip(axes.flat, panels, strict=False):
        _panel(axis, name, grid, profile.alpha)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _brief(name: str) -> str:
    return name if len(name) <= 40 else name[:39] + "…"


def _panel(axis: Axes, name: str, grid: Grid, over: Grid) -> None:
    """``grid`` at the measured points of alpha; cells that no batch may have stay empty."""
    seconds = np.where(np.isnan(over.seconds), np.nan, grid.at(over.rows, over.lengths))
    shown = np.maximum(seconds, FAINT) * 1e3
    axis.pcolormesh(shown, norm=LogNorm(), cmap="viridis", edgecolors="white", linewidth=0.5)
    middle = np.sqrt(np.nanmin(shown) * np.nanmax(shown))
    for (r, c), value in np.ndenumerate(shown):
        if not np.isnan(value):
            colour = "white" if value < middle else "black"
            axis.text(c + 0.5, r + 0.5, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=7)
    axis.set_xticks(np.arange(len(over.lengths)) + 0.5, [str(n) for n in over.lengths])
    axis.set_yticks(np.arange(len(over.rows)) + 0.5, [str(n) for n in over.rows])
    axis.set_xlabel("longest row, tokens")
    axis.set_ylabel("rows" if over is grid else "rows of one task")
    axis.set_title(f"{name} (ms)", fontsize=10)
