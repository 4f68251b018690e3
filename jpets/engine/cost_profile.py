"""Measures a cost profile: alpha over padded and packed shapes, beta of every delta class.

Costs depend on shapes, not on values, and every layer costs the same: what is measured is a randomly initialised stack
of the first few layers, which compiles in a fraction of the time, and scaled up.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from scipy.optimize import nnls

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.assembly import Row
from jpets.engine.bucket import FULL, Bucket, Variant, make_variant, replaces_weights
from jpets.engine.profile import full_rows
from jpets.engine.program import Family, Program, ProgramKey, compile_program
from jpets.engine.replica import Replica
from jpets.model.encoder import random_params
from jpets.scheduling.profile import CostProfile, Grid, PackedPoint
from jpets.scheduling.queue import Groups

log = logging.getLogger(__name__)

MOST_ROWS = 256
MOST_LAYERS = 4
"""Layers that are measured. More than fit into a processor's caches with their weights, few enough to compile fast."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
LIGHT_SHAPES = ((4, 16), (8, 32), (32, 32), (8, 128))
HEAVY_ROWS = (1, 2, 3, 4, 8, 16, 32)
HEAVY_LENGTHS = (8, 16, 32, 48, 64, 128, 256)
HEAVY_TOKENS = 256
SLOW = 0.05
"""Seconds from which a run is timed three times only: it has less noise, and there is not much time."""

Progress = Callable[[str, int, int], None]
Timed = Callable[[], object]


def measure_profile(
    family: Family, sharding: jax.sharding.Sharding, *, max_tokens: int, repeats: int = 5, progress: Progress
) -> CostProfile:
    """A profile of ``family``'s classes for shapes of up to ``max_tokens`` tokens. Needs the device to itself."""
    bench = _Bench(family, sharding, max_tokens, repeats)
    longest = [n for n in LENGTHS if n <= min(family.config.max_positions, max_tokens)]
    shapes = [(n, length) for length in longest for n in ROWS if n * length <= max_tokens]
    sizes = [tokens for tokens in (64, 128, 256, 512, 1024, 2048, 4096) if tokens <= max_tokens]
    classes = [key for key, _ in family.slots if class_method(key.method).kind != "head"]
    total = len(shapes) + len(sizes) + len(classes) + 1
    done = 0

    def step() -> None:
        nonlocal done
        progress("cost profile", done, total)
        done += 1

    seconds = np.full((len(ROWS), len(longest)), np.nan)
    for n, length in shapes:
        step()
        seconds[ROWS.index(n), longest.index(length)] = bench.bare(Bucket(n * length, ((n, length),)))
    packed = []
    for tokens in sizes:
        step()
        groups = _typical_groups(tokens, longest[-1])
        packed.append(PackedPoint(tokens, groups, bench.bare(Bucket(tokens, groups))))
    beta: dict[str, Grid] = {}
    for key in classes:
        step()
        heavy = class_method(key.method).kind == "heavy"
        beta[str(key)] = bench.heavy(key) if heavy else bench.light(key)
    step()
    heavies = [key for key in classes if class_method(key.method).kind == "heavy"]
    loop = bench.loop_share(heavies) if heavies else 0.0
    replaced = {str(key): bench.replaced_share(key) for key in heavies if replaces_weights(key)}
    progress("cost profile", total, total)
    alpha = Grid(np.array(ROWS), np.array(longest), seconds)
    return CostProfile(alpha, tuple(packed), beta, frozenset(map(str, heavies)), loop, replaced)


class DeltaCosts:
    """What rows of heavy classes add to the time of a program, by a cost profile (beta, PetS section 4.1).

    The time of a program was measured with its windows for light classes, whether rows use them or not.
    """

    def __init__(self, profile: CostProfile, family: Family) -> None:
        rows, lengths = np.arange(1, MOST_ROWS + 1), np.arange(1, family.config.max_positions + 1)
        heavy = [key for key, _ in family.slots if class_method(key.method).kind == "heavy"]
        self._tables = {key: profile.beta[str(key)].at(rows, lengths) for key in heavy if str(key) in profile.beta}

    def seconds(self, rows: Sequence[Row]) -> float:
        """For each task the cost of its rows, all as long as the longest (PetS equation 2)."""
        lengths: dict[tuple[ClassKey, int], list[int]] = {}
        for row in rows:
            for key, slot in row.slots.items():
                if key in self._tables:
                    lengths.setdefault((key, slot), []).append(row.length)
        return float(
            sum(self._tables[key][min(len(own), MOST_ROWS) - 1, max(own) - 1] for (key, _), own in lengths.items())
        )


def load_profile(path: pathlib.Path) -> CostProfile | None:
    """The profile kept in ``path``; None where there is none. What cannot be read is removed, to be measured again.

    The name carries the device, the backbone's shape, the delta classes and the versions, so a stale one has another.
    """
    try:
        return CostProfile.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.warning("the cost profile cannot be used and is measured again by `jpets profile`: %s", error)
        path.unlink(missing_ok=True)
        return None


def _typical_groups(tokens: int, longest: int) -> Groups:
    """Many short rows, half as many of medium length, a few longer ones."""
    wanted = {32: max(1, tokens // 32), 48: max(1, tokens // 64), 64: max(1, tokens // 512)}
    groups = {min(length, longest): n for length, n in wanted.items()}
    return tuple((n, length) for length, n in sorted(groups.items()))


class _Bench:
    """A short stack of layers with every class's bank, and timings in it scaled to the whole backbone."""

    def __init__(self, family: Family, sharding: jax.sharding.Sharding, max_tokens: int, repeats: int) -> None:
        self._heavy_tokens = min(HEAVY_TOKENS, max_tokens)
        self._layers = min(MOST_LAYERS, family.config.layers)
        self._scale = family.config.layers / self._layers
        config = dataclasses.replace(family.config, layers=self._layers)
        self._short = {key: _shortened(key, self._layers, self._scale) for key, _ in family.slots}
        slots = dict.fromkeys(self._short.values(), 2)  # two classes may become equal when they are cut short
        self._family = Family(config, family.dtype, tuple(sorted(slots.items())))
        self._replica = Replica(self._family, random_params(config), 0, sharding)
        self._repeats = repeats
        self._programs: dict[ProgramKey, Program] = {}
        self._rng = np.random.default_rng(0)

    def bare(self, bucket: Bucket) -> float:
        program = self._program(bucket, Variant())
        (seconds,) = self._medians([self._full(program)])
        return seconds * self._scale

    def light(self, key: ClassKey) -> Grid:
        """A window's cost grows with its cells, whatever the rows in it: proportional to n l."""
        cells, costs = [], []
        for n, length in LIGHT_SHAPES:
            bucket = Bucket(n * length, ((n, length),))
            own = self._program(bucket, make_variant({self._short[key]: FULL}))
            with_class, without = self._medians([self._full(own), self._full(self._program(bucket, Variant()))])
            cells.append(n * length)
            costs.append(max(0.0, with_class - without) * self._class_scale(key))
        rate = float(np.dot(cells, costs) / np.dot(cells, cells))
        rows, lengths = np.array([1, ROWS[-1]]), np.array([1, LENGTHS[-1]])
        return Grid(rows, lengths, rate * rows[:, None] * lengths[None, :].astype(float))

    def heavy(self, key: ClassKey) -> Grid:
        """One program runs any number of rows: what they add to the same program without any."""
        program = self._program(self._heavy_bucket(), make_variant({self._short[key]: FULL}))
        bucket = program.key.bucket
        cases = [(n, m) for n in HEAVY_ROWS for m in HEAVY_LENGTHS if bucket.holds(np.full(n, m))]
        runs = [self._of_one_task(program, key, n, m) for n, m in cases]
        idle, *seconds = self._medians([self._full(program), *runs])
        added = np.maximum(0.0, np.array(seconds) - idle) * self._class_scale(key)
        # the differences are as small as the noise: what is sure is a part for the task and one for its tokens
        tokens = np.array([n * m for n, m in cases], float)
        (each, token), _ = nnls(np.stack([np.ones_like(tokens), tokens], axis=1), added)
        rows, lengths = np.array([1, HEAVY_ROWS[-1]]), np.array([1, HEAVY_LENGTHS[-1]])
        return Grid(rows, lengths, each + token * rows[:, None] * lengths[None, :].astype(float))

    def replaced_share(self, key: ClassKey) -> float:
        """What a batch saves of its shared part when it leaves out the products that a mask on every row replaces."""
        bucket, own = self._heavy_bucket(), self._short[key]
        short = bucket.groups[0][1]
        programs = [self._program(bucket, make_variant({own: FULL}, replaced=replaced)) for replaced in (False, True)]
        runs = [self._of_one_task(program, key, self._heavy_tokens // short, short) for program in programs]
        with_product, without, bare = self._medians([*runs, self._full(self._program(bucket, Variant()))])
        return float(np.clip((with_product - without) / bare, 0.0, 1.0))

    def loop_share(self, keys: Sequence[ClassKey]) -> float:
        """How much slower a program is for having loops over these classes, with no row in them."""
        bucket = self._heavy_bucket()
        looped = self._program(bucket, make_variant({self._short[key]: FULL for key in keys}))
        with_loops, without = self._medians([self._full(looped), self._full(self._program(bucket, Variant()))])
        return max(0.0, with_loops / without - 1)

    def _class_scale(self, key: ClassKey) -> float:
        return len(key.layers) / len(self._short[key].layers) if key.layers else self._scale

    def _heavy_bucket(self) -> Bucket:
        """Short rows by the dozen or some long ones."""
        tokens = self._heavy_tokens
        longest = min(HEAVY_LENGTHS[-1], self._family.config.max_positions, tokens)
        short = min(32, longest)
        groups = {short: max(2, min(HEAVY_ROWS[-1], tokens // 8)), longest: max(2, tokens // 48)}
        return Bucket(tokens, tuple((n, length) for length, n in sorted(groups.items())))

    def _program(self, bucket: Bucket, variant: Variant) -> Program:
        key = ProgramKey(bucket, variant)
        if key not in self._programs:
            self._programs[key] = compile_program(self._family, key)
        return self._programs[key]

    def _full(self, program: Program) -> Timed:
        return self._run(program, full_rows(program.key.bucket, self._family.config.vocab_size))

    def _of_one_task(self, program: Program, key: ClassKey, rows: int, length: int) -> Timed:
        ids = self._rng.integers(0, self._family.config.vocab_size, (rows, length)).astype(np.int32)
        slots: Mapping[ClassKey, int] = {self._short[key]: 1}
        return self._run(program, [Row(row, np.zeros_like(row), slots, 0) for row in ids])

    def _run(self, program: Program, rows: Sequence[Row]) -> Timed:
        assembled = self._replica.assemble(rows, program)
        return lambda: jax.block_until_ready(self._replica.dispatch(program, assembled))

    def _medians(self, runs: Sequence[Timed]) -> list[float]:
        """Median seconds of each, interleaved, after one run to warm up."""
        start = time.perf_counter()
        for run in runs:
            run()
        slow = time.perf_counter() - start > SLOW * len(runs)
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(min(self._repeats, 3) if slow else self._repeats):
            for run, seconds in zip(runs, times, strict=True):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        return [statistics.median(seconds) for seconds in times]


def _shortened(key: ClassKey, layers: int, scale: float) -> ClassKey:
    """The class on a share of its layers, in a stack of ``layers``."""
    if not key.layers:
        return key
    count = max(1, min(layers, round(len(key.layers) / scale)))
    return dataclasses.replace(key, layers=tuple(range(count)))
