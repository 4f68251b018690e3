"""What programs cost: estimated from their arithmetic, measured at the first start, updated while they serve, and
stored."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from scipy.optimize import nnls

from jpets.deltas.operators import Operators
from jpets.engine.batch.assembly import Assembled
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Row
from jpets.engine.costs.pace import HABIT, SETTLED, Pace
from jpets.engine.device.replica import Replica
from jpets.engine.programs.network import Network
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.engine.programs.shared_file import SharedFile

FORGETTING = 0.003
"""Weight of the latest batch in what its program takes at best, where it took more: most slowness passes."""
SURPRISE = 2.0
"""Factor by which a batch may differ from the expected time; beyond it, something else took the time."""
FIRST_RATE = 1e-11
"""Seconds per multiply-add before anything was measured."""
LEAST_SECONDS = 1e-7
"""A program that takes less was not timed."""
USUAL_LOOP = 0.1
"""Share by which loops over heavy classes make programs slower, before it was measured."""


class CostTable:
    """Seconds of each program by its name, in a JSON file that other processes add to at any time.

    The file's name contains everything that makes figures stale: backbone shape, number format, device, versions; an
    entry's the candidates of operators that were chosen for its classes.
    """

    def __init__(self, path: pathlib.Path, family: Family, operators: Callable[[], Operators] | None = None) -> None:
        """``operators`` gives those of the family as it is now: classes come later, with candidates of their own."""
        self._file = SharedFile(path, "costs of programs", _parsed, _written)
        self._network = family.network
        self._operators = operators or (lambda: family.operators)
        self.pace = Pace()
        self._seconds: dict[str, float] = {}
        self._timed: dict[ProgramKey, float] = {}
        """Programs whose times estimates rest on."""
        self.base, self.rate = 0.0, FIRST_RATE
        """Seconds of a program without any arithmetic, and of each multiply-add, as the timed programs say."""
        self.version = 0
        """Rises whenever estimates change."""
        self.reload()

    def reload(self) -> None:
        """Reads the file anew."""
        self._seconds.update(self._file.read() or {})

    def get(self, key: ProgramKey) -> float | None:
        return self._seconds.get(self._name(key))

    def timed(self, key: ProgramKey) -> float | None:
        """The seconds of a program that estimates rest on."""
        return self._timed.get(key)

    def set(self, key: ProgramKey, seconds: float) -> None:
        """Keeps a program's measured time, and uses it for the estimates of others."""
        self._seconds[self._name(key)] = seconds
        self._timed[key] = seconds
        self.base, self.rate = self._line()
        self.version += 1

    def _line(self) -> tuple[float, float]:
        """The line through the timed programs with the least sum of squared relative errors."""
        work = np.array([self._arithmetic(key) for key in self._timed])
        seconds = np.maximum(np.array(list(self._timed.values())), LEAST_SECONDS)
        if len(work) > 1:
            (base, rate), _ = nnls(np.stack([1 / seconds, work / work.max() / seconds], axis=1), np.ones(len(work)))
            if rate > 0:
                return float(base), float(rate / work.max())
        return 0.0, float(np.median(seconds / work))

    def of_arithmetic(self, multiply_adds: float) -> float:
        """Estimated seconds of a program by its arithmetic."""
        return self.base + multiply_adds * self.rate

    @property
    def loop_share(self) -> float:
        """By which share of the bare part loops over heavy classes make a program slower, with no row in them: the
        median of the timed programs of one bucket with and without loops."""
        light, heavy = (
            {k.bucket: s for k, s in self._timed.items() if k.trunk is None and k.variant.has("heavy") == looped}
            for looped in (False, True)
        )
        shares = [
            (heavy[bucket] - light[bucket]) / self.of_arithmetic(self._network.arithmetic(bucket, Variant()))
            for bucket in heavy.keys() & light.keys()
        ]
        return min(1.0, max(0.0, statistics.median(shares))) if shares else USUAL_LOOP

    def follow(self, program: Program, seconds: float) -> None:
        """Counts the time of a batch in ``program``."""
        with self.pace.lock:
            known = program.seconds
            program.seconds += HABIT * (min(max(seconds, known / SURPRISE), known * SURPRISE) - known)
            program.followed += 1
            if program.best < math.inf:
                weight = FORGETTING if program.seconds > program.best else HABIT
                program.best += weight * (program.seconds - program.best)
            elif program.followed >= program.unsettled + 2 * SETTLED:
                program.best = program.seconds

    def estimate(self, key: ProgramKey) -> float:
        """Measured seconds, or what the program's arithmetic says."""
        if (seconds := self.get(key)) is not None:
            return seconds
        return self.of_arithmetic(self._arithmetic(key))

    def _arithmetic(self, key: ProgramKey) -> float:
        """Multiply-adds; each layer has as many."""
        own = self._network.arithmetic(key.bucket, key.variant, static_runs=self._operators().static_runs)
        if key.trunk is None:
            return own
        below = self._network.arithmetic(key.trunk.bucket, Variant())
        return key.trunk.mean(self._network.config.layers, below, own)

    def _name(self, key: ProgramKey) -> str:
        """With the candidates of classes that have others than the family's."""
        operators = self._operators()
        if not operators.classes:  # plans ask for many names
            return str(key)
        names = [(of, operators.exceptions_of(str(of))) for of in key.variant.classes()]
        return " ".join([str(key), *(f"{of} by {own}" for of, own in names if own)])

    def save(self) -> None:
        """Adds what was timed here to the file."""
        own = self._by_name(self._timed)
        self._file.update(lambda stored: {**(stored or {}), **own})

    def follow_up(self, programs: Iterable[Program]) -> None:
        """Adds the times that batches of ``programs`` were found to take, at best, and what was timed here where the
        file has no time yet: another process may have found better ones since."""
        busy = self.pace.busy  # the next start may find a machine with less to do
        measured = {p.key: min(p.seconds / busy, p.best) for p in programs if p.followed}
        found = self._by_name(measured)
        self._seconds.update(found)
        own = self._by_name(self._timed)
        self._file.update(lambda stored: {**own, **(stored or {}), **found})

    def _by_name(self, seconds: Mapping[ProgramKey, float]) -> dict[str, float]:
        return {self._name(key): own for key, own in {**seconds}.items()}  # of another thread's, a copy at once


def _parsed(text: str) -> dict[str, float]:
    try:
        found = {str(name): float(seconds) for name, seconds in json.loads(text).items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"not a table of costs: {error}") from error
    return {name: seconds for name, seconds in found.items() if 0 < seconds < math.inf}


def _written(seconds: Mapping[str, float]) -> str:
    return json.dumps(seconds, indent=1, sort_keys=True)


def full_rows(bucket: Bucket, network: Network) -> list[Row]:
    """Rows without deltas that fill a bucket, of lengths as equal as its groups allow."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    for n, longest in reversed(bucket.groups):
        share = longest if bucket.rectangular else max(1, min(longest, (bucket.tokens - sum(lengths)) // n))
        for _ in range(n):
            if bucket.holds(np.array([*lengths, share])):
                lengths.append(share)
    return [Row(network.sample(rng, length), {}, 0, length) for length in lengths]


def rows_of(key: ProgramKey, network: Network) -> list[Row]:
    """Rows without deltas, but for those without which the program takes none, that fill its bucket as far as it has
    room for their runs."""
    slots, variant = key.variant.least_slots(), key.variant
    rows = [dataclasses.replace(row, slots=slots) for row in full_rows(key.bucket, network)]

    def fit() -> bool:
        levels = Layout(rows, key.bucket).run_levels(variant.run)
        return all(level <= variant.level(of) for of, level in levels.items())

    while variant.runs and len(rows) > 1 and not fit():
        del rows[0]  # the longest
    return rows


def full_batch(replica: Replica, program: Program) -> Assembled:
    """Rows without deltas, as far as the program takes them, that fill its bucket."""
    key, network = program.key, replica.family.network
    rows = rows_of(key, network)
    below = None if key.trunk is None else Layout(full_rows(key.trunk.bucket, network), key.trunk.bucket)
    return replica.fill(Layout(rows, key.bucket), rows, program, below)


def measure(replica: Replica, program: Program, repeats: int) -> float:
    """Least seconds of a full bucket without deltas, after one run to warm up: what else the machine does only adds to
    them. Owner thread, or before it starts."""
    assembled = full_batch(replica, program)
    jax.block_until_ready(replica.try_out(program, assembled))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(replica.try_out(program, assembled))
        times.append(time.perf_counter() - start)
    return min(times, default=0.0)
