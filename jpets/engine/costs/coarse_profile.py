"""A coarse cost profile: arithmetic, at the speed that the start measured. It is there before anything else is.

Its figures are good to about a factor of two on a CPU: they rank classes and shapes until better ones come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import HEAVY_RUNS, SEGMENT, SETUP_TOKENS, Bucket, Variant, replaces_weights
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.programs.program import Family
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint, Steps
from jpets.scheduling.queue import Groups

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens of the packed shapes whose costs are figured."""
BYTE = 15.0
"""Multiply-adds of a dense product that take as long as moving a byte (CPU: 10 GB/s beside 300 GFLOP/s)."""
SPARSE_SETUP = 6000
"""``SETUP_TOKENS`` of a class that multiplies entry by entry: on a CPU a step over an entry takes 20 to 40 ns, for any
number of tokens."""

WINDOW = 2.0
"""Cells that a light class's window computes for each token of its rows, at least: segments are whole, and a window has
room in eighths of the batch (rows of 3 to 32 tokens in segments of 32 fill 0.55 of them)."""


def coarse_profile(family: Family, costs: CostTable) -> CostProfile:
    """Figures for all classes of ``family``, at the speed of the programs that ``costs`` knows."""
    network = family.network
    lengths = [n for n in LENGTHS if n <= network.config.max_positions] or [network.config.max_positions]
    keys = priced(key for key, _ in family.slots)
    heavy = [key for key in keys if class_method(key.method).kind == "heavy"]

    steps = {str(key): _steps(key, family, costs.rate) for key in heavy}

    def bare(tokens: int, groups: Groups) -> float:
        return costs.of_arithmetic(network.arithmetic(Bucket(tokens, groups), Variant()))

    alpha = [[bare(n * length, ((n, length),)) for length in lengths] for n in ROWS]
    return CostProfile(
        Grid(np.array(ROWS), np.array(lengths), np.array(alpha)),
        tuple(PackedPoint(tokens, groups, bare(tokens, groups)) for tokens, groups in typical(SIZES, lengths[-1])),
        {str(key): stepped_grid(steps[str(key)]) if key in heavy else _grid(key, family, costs.rate) for key in keys},
        frozenset(map(str, heavy)),
        costs.loop_share if heavy else 0.0,
        {str(key): 0.0 for key in heavy if replaces_weights(key)},
        steps,
    )


def priced(classes: Iterable[ClassKey]) -> list[ClassKey]:
    """The classes that have a beta: heads are part of the shared work."""
    return [key for key in classes if class_method(key.method).kind != "head"]


def typical(sizes: Sequence[int], longest: int) -> Iterator[tuple[int, Groups]]:
    """Packed shapes of these numbers of tokens: many short rows, half as many of medium length, a few longer ones."""
    for tokens in sizes:
        wanted = {32: max(1, tokens // 32), 48: max(1, tokens // 64), 64: max(1, tokens // 512)}
        groups = {min(length, longest): n for length, n in wanted.items()}
        yield tokens, tuple((n, length) for length, n in sorted(groups.items()))


def stepped_grid(steps: Steps) -> Grid:
    """The cost of one task's rows by their number and length, in steps of the best length."""
    rows, lengths = np.array(ROWS), np.array(LENGTHS)
    tokens = rows[:, None] * lengths[None, :]
    return Grid(rows, lengths, np.min([steps.seconds(tokens, run) for run in HEAVY_RUNS], axis=0))


def _steps(key: ClassKey, family: Family, rate: float) -> Steps:
    """A heavy class loops with fixed work for each step; ``rate`` is in seconds a multiply-add. Where a program
    computes all runs that it has room for, rows add nothing to its time."""
    if family.operators.static_runs:
        return Steps(0.0, 0.0, 0.0)
    token = rate * _layers(key, family) * class_method(key.method).work(key, family.config, 1, 0).flops / 2
    dense = replaces_weights(key) or not any(size for _, size in key.sites)
    return Steps(0.0, token * (SETUP_TOKENS if dense else SPARSE_SETUP), token)


def _grid(key: ClassKey, family: Family, rate: float) -> Grid:
    """The cost of another class grows with tokens."""
    method, config = class_method(key.method), family.config
    each = method.work(key, config, 1, 0)
    work = each.flops / 2  # a row's: element by element, fused into other operators
    if method.kind != "row":  # each segment gathers its task's matrices
        work += BYTE * (each.bytes + method.work(key, config, 0, 1).bytes / SEGMENT)
        work *= WINDOW
    rows, lengths = np.array([1, ROWS[-1]]), np.array([1, LENGTHS[-1]])
    return Grid(rows, lengths, rate * _layers(key, family) * work * rows[:, None] * lengths[None, :].astype(float))


def _layers(key: ClassKey, family: Family) -> int:
    return len(key.layers) or family.config.layers
