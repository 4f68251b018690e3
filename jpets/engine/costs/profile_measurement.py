"""Measures all figures of a cost profile at once: alpha over padded and packed shapes, beta of every delta class."""

from __future__ import annotations

import time

import numpy as np

from jpets.engine.batch.bucket import Bucket
from jpets.engine.costs.bench import Bench
from jpets.engine.costs.coarse_profile import LENGTHS, ROWS, SIZES, priced, typical
from jpets.engine.costs.figures import Figures, profile_of
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, Program, ProgramKey, compile_programs
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint
from jpets.types import Progress


def measure_figures(
    family: Family,
    mesh: MeshSlice,
    *,
    max_tokens: int,
    rounds: int = 7,
    progress: Progress,
) -> Figures:
    """Figures of ``family``'s classes and of shapes of up to ``max_tokens`` tokens. Needs the device to itself.

    Every point is timed once in each round, so that a device that slows down for a while does so for all points.
    """
    bench = Bench(family, mesh, max_tokens)
    longest = [n for n in LENGTHS if n <= min(family.config.max_positions, max_tokens)]
    shapes = [(n, length) for length in longest for n in ROWS if n * length <= max_tokens]
    sizes = [tokens for tokens in SIZES if tokens <= max_tokens]
    padded = {(n, length): bench.bare(Bucket(n * length, ((n, length),))) for n, length in shapes}
    packed = [(tokens, groups, bench.bare(Bucket(tokens, groups))) for tokens, groups in typical(sizes, longest[-1])]
    classes = {str(key): bench.of_class(key) for key in priced(key for key, _ in family.slots)}
    _time(bench, rounds, progress)

    seconds = np.full((len(ROWS), len(longest)), np.nan)
    for (n, length), found in padded.items():
        seconds[ROWS.index(n), longest.index(length)] = found()
    return Figures(
        Grid(np.array(ROWS), np.array(longest), seconds),
        tuple(PackedPoint(tokens, groups, found()) for tokens, groups, found in packed),
        {name: found() for name, found in classes.items()},
    )


def measure_profile(
    family: Family,
    mesh: MeshSlice,
    *,
    max_tokens: int,
    rounds: int = 7,
    progress: Progress,
) -> CostProfile:
    """``measure_figures`` as the profile of ``family``'s classes."""
    figures = measure_figures(family, mesh, max_tokens=max_tokens, rounds=rounds, progress=progress)
    return profile_of(figures, priced(key for key, _ in family.slots))


def _time(bench: Bench, rounds: int, progress: Progress) -> None:
    """Compiles what the cases need, and times them all in turn, ``rounds`` times after one to warm up."""
    cases = list(bench.cases.values())
    keys = list(dict.fromkeys(case.program for case in cases))
    total = len(keys) + rounds + 1
    programs: dict[ProgramKey, Program] = {}
    for program in compile_programs(bench.family, keys, bench.replica.mesh):
        progress("cost profile", len(programs), total)
        programs[program.key] = program
    runs = [bench.run_of(case, programs[case.program]) for case in cases]
    for number in range(rounds + 1):
        progress("cost profile", len(keys) + number, total)
        for case, run in zip(cases, runs, strict=True):
            start = time.perf_counter()
            run()
            if number:
                case.seconds.append(time.perf_counter() - start)
    progress("cost profile", total, total)
