"""What programs cost: estimated from their arithmetic, measured at the first start, updated while they serve, and
stored."""

from __future__ import annotations

import json
import logging
import pathlib
import statistics
import time

import jax
import numpy as np

from jpets.engine.batch.assembly import Assembled
from jpets.engine.batch.bucket import Bucket
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.programs.network import Network
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.engine.programs.store import STALE_WRITE_SECONDS
from jpets.errors import OutOfSpace
from jpets.files import TEMPORARY, sweep, write_atomic

log = logging.getLogger(__name__)

HABIT = 0.1
"""Weight of the latest batch in the cost of its program."""
SURPRISE = 2.0
"""Factor by which a batch may differ from the expected time; beyond it, something else took the time."""
FIRST_RATE = 1e-11
"""Seconds per multiply-add before anything was measured."""


class CostTable:
    """Seconds of each program by its name, in a JSON file that other processes may replace at any time.

    The file's name contains everything that makes figures stale: backbone shape, number format, device, versions.
    """

    def __init__(self, path: pathlib.Path, family: Family) -> None:
        self._path = path
        self._network = family.network
        self._seconds: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._rate = FIRST_RATE
        sweep(path.parent, TEMPORARY, STALE_WRITE_SECONDS)
        self.reload()

    def reload(self) -> None:
        """Reads the file anew."""
        if self._path.exists():
            try:
                stored = json.loads(self._path.read_text(encoding="utf-8"))
                self._seconds = {str(name): float(value) for name, value in stored.items()}
            except (ValueError, AttributeError, TypeError):
                self._path.unlink(missing_ok=True)  # half-written or foreign: measured again

    def get(self, key: ProgramKey) -> float | None:
        return self._seconds.get(str(key))

    def set(self, key: ProgramKey, seconds: float) -> None:
        self._seconds[str(key)] = seconds
        self.rate(key, seconds)

    def rate(self, key: ProgramKey, seconds: float) -> None:
        """Uses a measured program for the estimates of others."""
        self._rates[str(key)] = seconds / self._network.arithmetic(key.bucket, key.variant)
        self._rate = statistics.median(self._rates.values())

    def follow(self, program: Program, seconds: float) -> None:
        """Counts the time of a batch in ``program``."""
        known = program.seconds
        program.seconds += HABIT * (min(max(seconds, known / SURPRISE), known * SURPRISE) - known)
        program.followed = True

    def estimate(self, key: ProgramKey) -> float:
        """Measured seconds, or arithmetic times the median rate of the measured programs."""
        if (seconds := self.get(key)) is not None:
            return seconds
        return self._network.arithmetic(key.bucket, key.variant) * self._rate

    def save(self) -> None:
        """Writes the file. A full or read-only disk only makes the next start slower."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(self._seconds, indent=1, sort_keys=True).encode())
        except (OSError, OutOfSpace) as error:
            log.warning("the cost table could not be kept: %s", error)


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


def full_batch(replica: Replica, program: Program) -> Assembled:
    """Rows without deltas that fill a program's bucket."""
    return replica.assemble(full_rows(program.key.bucket, replica.family.network), program)


def measure(replica: Replica, program: Program, repeats: int) -> float:
    """Median seconds of a full bucket without deltas, after one run to warm up. Owner thread, or before it starts."""
    assembled = full_batch(replica, program)
    jax.block_until_ready(replica.try_out(program, assembled))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(replica.try_out(program, assembled))
        times.append(time.perf_counter() - start)
    return statistics.median(times) if times else 0.0
