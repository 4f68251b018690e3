"""What programs cost: estimated from their arithmetic, measured at the first start, followed while they serve, kept."""

from __future__ import annotations

import json
import logging
import pathlib
import statistics
import time

import jax
import numpy as np

from jpets.config import BackboneConfig
from jpets.engine.batch.assembly import Assembled, Row
from jpets.engine.batch.bucket import Bucket, capacity, windowed
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import STALE_WRITE_SECONDS, Family, Program, ProgramKey
from jpets.errors import OutOfSpace
from jpets.files import TEMPORARY, sweep, write_atomic
from jpets.scheduling.costs.profile import attention_cells

log = logging.getLogger(__name__)

HEAVY_LOOP = 0.2
"""Share of the bare cost that the loops over heavy classes add before the first heavy row (measured on a CPU)."""


ATTENTION = 5
"""Time of a multiply-add in attention over one in a linear site (measured on a CPU): softmax is not counted apart."""
HABIT = 0.1
"""Share that the latest batch has in what its program is taken to cost."""
SURPRISE = 2.0
"""Factor by which one batch may differ from what was expected: beyond it something else took the time."""


def arithmetic(config: BackboneConfig, key: ProgramKey) -> float:
    """Multiply-adds of a program, those of attention weighted: the unit in which unmeasured programs are estimated."""
    bucket, variant = key.bucket, key.variant
    d, layers = config.hidden_size, config.layers
    total = layers * (bucket.tokens * config.layer_weights() + ATTENTION * 2 * d * attention_cells(bucket.groups))
    if variant.has("heavy"):
        total = int(total * (1 + HEAVY_LOOP))
    for class_key in variant.classes():
        if windowed(class_key):
            length = bucket.longest if bucket.rectangular else bucket.segment
            cells = capacity(bucket, variant.level(class_key)) * length
            volume = sum(2 * d * size for _, size in class_key.sites) * len(class_key.layers)
            total += cells * volume
    return float(total)


FIRST_RATE = 1e-11
"""Seconds a multiply-add before anything was measured."""


class CostTable:
    """Seconds of each program by its name, in a JSON file that other processes may replace at any time.

    The name of the file carries everything that makes figures stale: backbone shape, number format, device, versions.
    """

    def __init__(self, path: pathlib.Path, family: Family) -> None:
        self._path = path
        self._config = family.config
        self._seconds: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._rate = FIRST_RATE
        sweep(path.parent, TEMPORARY, STALE_WRITE_SECONDS)
        self.reload()

    def reload(self) -> None:
        """Takes what the file has now."""
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
        """Lets a measured program count for the estimates of others."""
        self._rates[str(key)] = seconds / arithmetic(self._config, key)
        self._rate = statistics.median(self._rates.values())

    def follow(self, program: Program, seconds: float) -> None:
        """Counts what a batch took in ``program``."""
        known = program.seconds
        program.seconds += HABIT * (min(max(seconds, known / SURPRISE), known * SURPRISE) - known)
        program.followed = True

    def estimate(self, key: ProgramKey) -> float:
        """Measured seconds, or arithmetic times the median rate of the measured programs."""
        if (seconds := self.get(key)) is not None:
            return seconds
        return arithmetic(self._config, key) * self._rate

    def save(self) -> None:
        """A full or read-only disk only costs the next start its time."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(self._seconds, indent=1, sort_keys=True).encode())
        except (OSError, OutOfSpace) as error:
            log.warning("the cost table could not be kept: %s", error)


def full_rows(bucket: Bucket, vocab_size: int) -> list[Row]:
    """Rows without deltas that fill a bucket, as even in length as its groups allow."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    for n, longest in reversed(bucket.groups):
        share = longest if bucket.rectangular else max(1, min(longest, (bucket.tokens - sum(lengths)) // n))
        for _ in range(n):
            if bucket.holds(np.array([*lengths, share])):
                lengths.append(share)
    ids = [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
    return [Row(row, np.zeros_like(row), {}, 0) for row in ids]


def full_batch(replica: Replica, program: Program) -> Assembled:
    """Rows without deltas that fill a program's bucket."""
    return replica.assemble(full_rows(program.key.bucket, replica.family.config.vocab_size), program)


def measure(replica: Replica, program: Program, repeats: int) -> float:
    """Median seconds of a full bucket without deltas, after one run to warm up. Owner thread, or before it starts."""
    assembled = full_batch(replica, program)
    jax.block_until_ready(replica.dispatch(program, assembled))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(replica.dispatch(program, assembled))
        times.append(time.perf_counter() - start)
    return statistics.median(times) if times else 0.0
