"""Measures a cost profile: alpha over padded and packed shapes, beta of every delta class.

Costs depend on shapes, not on values (except for ``Method.typical``), and every layer costs the same. So a randomly
initialised stack of the first few layers is measured, which compiles in a fraction of the time, and scaled up.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from scipy.optimize import nnls

from jpets.deltas import class_method
from jpets.deltas.bank import slot_arrays
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Bucket, Variant, make_variant, parse_bucket, replaces_weights
from jpets.engine.batch.rows import Row
from jpets.engine.costs.coarse_profile import LENGTHS, ROWS, SIZES, priced, typical
from jpets.engine.costs.cost_table import full_rows
from jpets.engine.costs.figures import ClassFigures, Figures, profile_of
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, Program, ProgramKey, compile_programs
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint
from jpets.types import Progress

STACK_WEIGHTS = 7_000_000
"""Least weights of the measured layers: more than a core's caches hold, few enough to compile fast."""
LIGHT_SHAPES = ("8x32", "8x128", "1024:32x32+16x64")
"""Padded and packed: in packed shapes a class gathers its window."""
LOOP_SHAPES = ("8x32", "512:16x32+8x64")
OfTasks = tuple[int, int, int]
"""Tasks, rows of each, and their length."""
HEAVY_CASES: Mapping[int, tuple[OfTasks, ...]] = {
    32: ((1, 1, 16), (1, 1, 32), (1, 4, 32), (4, 1, 16), (8, 1, 16), (4, 2, 32), (8, 1, 32)),
    128: ((1, 4, 32), (1, 8, 32), (2, 1, 32), (2, 4, 32)),
}
"""The least and the most of ``HEAVY_RUNS``, by tokens of a step: the lengths between follow from both."""
HEAVY_TOKENS = 256


def measure_figures(
    family: Family, mesh: MeshSlice, *, max_tokens: int, rounds: int = 7, progress: Progress
) -> Figures:
    """Figures of ``family``'s classes and of shapes of up to ``max_tokens`` tokens. Needs the device to itself.

    Every point is timed once in each round, so that a device that slows down for a while does so for all points.
    """
    bench = _Bench(family, mesh, max_tokens)
    longest = [n for n in LENGTHS if n <= min(family.config.max_positions, max_tokens)]
    shapes = [(n, length) for length in longest for n in ROWS if n * length <= max_tokens]
    sizes = [tokens for tokens in SIZES if tokens <= max_tokens]
    padded = {(n, length): bench.bare(Bucket(n * length, ((n, length),))) for n, length in shapes}
    packed = [(tokens, groups, bench.bare(Bucket(tokens, groups))) for tokens, groups in typical(sizes, longest[-1])]
    classes = {str(key): bench.of_class(key) for key in priced(key for key, _ in family.slots)}
    bench.measure(rounds, progress)

    seconds = np.full((len(ROWS), len(longest)), np.nan)
    for (n, length), found in padded.items():
        seconds[ROWS.index(n), longest.index(length)] = found()
    return Figures(
        Grid(np.array(ROWS), np.array(longest), seconds),
        tuple(PackedPoint(tokens, groups, found()) for tokens, groups, found in packed),
        {name: found() for name, found in classes.items()},
    )


def measure_profile(
    family: Family, mesh: MeshSlice, *, max_tokens: int, rounds: int = 7, progress: Progress
) -> CostProfile:
    """``measure_figures`` as the profile of ``family``'s classes."""
    figures = measure_figures(family, mesh, max_tokens=max_tokens, rounds=rounds, progress=progress)
    return profile_of(figures, priced(key for key, _ in family.slots))


@dataclasses.dataclass
class _Case:
    """A batch to time: these rows of tasks of class ``of``, or a full bucket of bare ones."""

    program: ProgramKey
    of: ClassKey | None = None
    rows: OfTasks = (0, 0, 0)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class _Bench:
    """A short stack of layers with every class's bank; its times are scaled to the whole backbone.

    Its methods name the cases that they need, and return a function that computes their figure after ``measure``.
    """

    def __init__(self, family: Family, mesh: MeshSlice, max_tokens: int) -> None:
        self._most_tokens = max_tokens
        self._longest = family.config.max_positions
        self._heavy_tokens = min(HEAVY_TOKENS, max_tokens)
        self._layers = min(family.config.layers, max(2, -(-STACK_WEIGHTS // family.config.layer_weights())))
        self._scale = family.config.layers / self._layers
        network = family.network.shortened(self._layers)
        self._short = {key: _shortened(key, self._layers, self._scale) for key, _ in family.slots}
        most = max(tasks for cases in HEAVY_CASES.values() for tasks, _, _ in cases)
        slots = dict.fromkeys(self._short.values(), 1 + most)  # two classes may become equal when they are shortened
        self._family = Family(network, family.dtype, tuple(sorted(slots.items())))
        params = network.random_params()
        self._replica = Replica(self._family, params, mesh)
        for key, _ in self._family.slots:
            if (part := class_method(key.method).typical(key, network.config)) is not None:
                arrays = slot_arrays(part, key, network.config, family.dtype, network.base_bias(params))
                for slot in range(1, 1 + most):
                    self._replica.write({key: (slot, arrays)})
        self._cases: dict[tuple[ProgramKey, ClassKey | None, OfTasks], _Case] = {}
        self._rng = np.random.default_rng(0)

    def bare(self, bucket: Bucket) -> Callable[[], float]:
        case = self._case(bucket)
        return lambda: case.median * self._scale

    def light(self, key: ClassKey) -> Callable[[], Grid]:
        """A window's cost grows with its cells, with any rows in it: proportional to n l."""
        variant = make_variant({self._short[key]: FULL})
        buckets = self._buckets(LIGHT_SHAPES)
        pairs = [(self._case(bucket, variant), self._case(bucket)) for bucket in buckets]

        def found() -> Grid:
            cells = np.array([bucket.tokens for bucket in buckets], float)
            costs = self._class_scale(key) * np.array([max(0.0, own.median - bare.median) for own, bare in pairs])
            rate = float(np.dot(cells, costs) / np.dot(cells, cells))
            rows, lengths = np.array([1, ROWS[-1]]), np.array([1, LENGTHS[-1]])
            return Grid(rows, lengths, rate * rows[:, None] * lengths[None, :].astype(float))

        return found

    def heavy(self, key: ClassKey) -> Callable[[], Grid]:
        """The time that rows add to the program that runs without any of them; one program runs any number of rows."""
        bucket, needs = self._heavy_bucket(), {self._short[key]: FULL}
        variants = {run: make_variant(needs, run) for run in HEAVY_CASES}
        timed = [
            (bucket.run(run), shape, self._case(bucket, variant, key, shape), self._case(bucket, variant))
            for run, variant in variants.items()
            for shape in HEAVY_CASES[run]
            if bucket.holds(np.full(shape[0] * shape[1], shape[2]))
        ]

        def found() -> Grid:
            added = self._class_scale(key) * np.array([max(0.0, own.median - idle.median) for *_, own, idle in timed])
            # The differences are as small as the noise. What is certain: a part for each task, one for each step over
            # its weights, and one for the tokens that the steps cover.
            steps = [tasks * -(-n * length // size) for size, (tasks, n, length), *_ in timed]
            terms = [(t[1][0], n, n * t[0]) for t, n in zip(timed, steps, strict=True)]
            weights = 1 / np.maximum(added, added.mean() / 4 or 1.0)
            (each, setup, token), _ = nnls(np.array(terms, float) * weights[:, None], added * weights)
            rows, lengths = np.array(ROWS), np.array(LENGTHS)
            tokens = rows[:, None] * lengths[None, :]
            costs = [each + -(-tokens // run) * (setup + token * run) for run in HEAVY_RUNS]
            return Grid(rows, lengths, np.min(costs, axis=0))

        return found

    def replaced_share(self, key: ClassKey) -> Callable[[], float]:
        """The share of a batch's shared part that is saved when a mask on every row replaces the shared products."""
        bucket, needs = self._heavy_bucket(), {self._short[key]: FULL}
        short = bucket.groups[0][1]
        rows = (1, self._heavy_tokens // short, short)
        product = self._case(bucket, make_variant(needs), key, rows)
        replaced = self._case(bucket, make_variant(needs, replaced=True), key, rows)
        bare = self._case(bucket)
        return lambda: float(np.clip((product.median - replaced.median) / bare.median, 0.0, 1.0))

    def loop_share(self, key: ClassKey) -> Callable[[], float]:
        """How much slower programs become by having a loop over this class, without any row in it."""
        looped = make_variant({self._short[key]: FULL})
        pairs = [(self._case(bucket, looped), self._case(bucket)) for bucket in self._buckets(LOOP_SHAPES)]

        def found() -> float:
            with_loop, bare = (sum(case.median for case in column) for column in zip(*pairs, strict=True))
            return max(0.0, with_loop / bare - 1)

        return found

    def of_class(self, key: ClassKey) -> Callable[[], ClassFigures]:
        """All figures of a class."""
        if class_method(key.method).kind != "heavy":
            light = self.light(key)
            return lambda: ClassFigures(light())
        beta, loop = self.heavy(key), self.loop_share(key)
        replaced = self.replaced_share(key) if replaces_weights(key) else lambda: 0.0
        return lambda: ClassFigures(beta(), loop(), replaced())

    def measure(self, rounds: int, progress: Progress) -> None:
        """Compiles what the cases need, and times them all in turn, ``rounds`` times after one to warm up."""
        cases = list(self._cases.values())
        keys = list(dict.fromkeys(case.program for case in cases))
        total = len(keys) + rounds + 1
        programs: dict[ProgramKey, Program] = {}
        for program in compile_programs(self._family, keys, self._replica.mesh):
            progress("cost profile", len(programs), total)
            programs[program.key] = program
        runs = [self._run(programs[case.program], self._rows(case)) for case in cases]
        for number in range(rounds + 1):
            progress("cost profile", len(keys) + number, total)
            for case, run in zip(cases, runs, strict=True):
                start = time.perf_counter()
                run()
                if number:
                    case.seconds.append(time.perf_counter() - start)
        progress("cost profile", total, total)

    def _case(
        self,
        bucket: Bucket,
        variant: Variant | None = None,
        of: ClassKey | None = None,
        rows: OfTasks = (0, 0, 0),
    ) -> _Case:
        """One figure may need what another one timed already."""
        key = (ProgramKey(bucket, variant or Variant()), of, rows)
        return self._cases.setdefault(key, _Case(*key))

    def _class_scale(self, key: ClassKey) -> float:
        return len(key.layers) / len(self._short[key].layers) if key.layers else self._scale

    def _buckets(self, shapes: Sequence[str]) -> list[Bucket]:
        """Those within the limits; where there are none, the longest row that is."""
        buckets = map(parse_bucket, shapes)
        within = [b for b in buckets if b.longest <= self._longest and b.tokens <= self._most_tokens]
        longest = min(self._longest, self._most_tokens)
        return within or [Bucket(longest, ((1, longest),))]

    def _heavy_bucket(self) -> Bucket:
        """Short rows by the dozen or some long ones."""
        tokens = self._heavy_tokens
        longest = min(tokens, self._longest)
        short = min(32, longest)
        groups = {short: max(2, tokens // 8), longest: max(2, tokens // 48)}
        return Bucket(tokens, tuple((n, length) for length, n in sorted(groups.items())))

    def _rows(self, case: _Case) -> list[Row]:
        network = self._family.network
        if case.of is None:
            return full_rows(case.program.bucket, network)
        tasks, rows, length = case.rows
        key = self._short[case.of]
        return [
            Row(network.sample(self._rng, length), {key: 1 + number // rows}, 0, length)
            for number in range(tasks * rows)
        ]

    def _run(self, program: Program, rows: Sequence[Row]) -> Callable[[], object]:
        assembled = self._replica.assemble(rows, program)
        return lambda: jax.block_until_ready(self._replica.try_out(program, assembled))


def _shortened(key: ClassKey, layers: int, scale: float) -> ClassKey:
    """The class on a share of its layers, in a stack of ``layers``."""
    if not key.layers:
        return key
    count = max(1, min(layers, round(len(key.layers) / scale)))
    return dataclasses.replace(key, layers=tuple(range(count)))
