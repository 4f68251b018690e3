"""The bench: times batches on a short stack of layers, and makes figures of classes and shapes of their times.

Costs depend on shapes, not on values (except for ``Method.typical``), and every layer costs the same. So a randomly
initialised stack of the first few layers is measured, which compiles in a fraction of the time, and scaled up.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls

from jpets.config import DType
from jpets.deltas import class_method
from jpets.deltas.bank import slot_arrays
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, Bucket, Variant, make_variant, parse_bucket, replaces_weights
from jpets.engine.batch.rows import Row
from jpets.engine.costs.coarse_profile import LENGTHS, ROWS, WINDOW, stepped_grid, typical
from jpets.engine.costs.cost_table import full_rows
from jpets.engine.costs.figures import ClassFigures
from jpets.engine.device.memory import banks_bytes, param_bytes
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.network import Network, Params
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.scheduling.costs.measured_profile import Grid, Steps

STACK_WEIGHTS = 7_000_000
"""Least weights of the measured layers: more than a core's caches hold, few enough to compile fast."""
LIGHT_SHAPES = ("8x32", "512:16x32+8x64", "8x128", "1024:32x32+16x64")
"""Padded and packed: in packed shapes a class gathers its window."""
LOOP_SHAPES = ("8x32", "512:16x32+8x64")
OfTasks = tuple[int, int, int]
"""Tasks, rows of each, and their length."""
HEAVY_CASES: Mapping[int, tuple[OfTasks, ...]] = {
    32: ((1, 1, 16), (1, 1, 32), (1, 4, 32), (4, 1, 16), (8, 1, 16), (4, 2, 32), (8, 1, 32)),
    64: ((1, 1, 32), (1, 4, 32), (4, 1, 16), (4, 2, 32)),
    128: ((1, 4, 32), (1, 8, 32), (2, 1, 32), (2, 4, 32)),
}
"""By tokens of a step. They are compared with the last one's rows without their deltas: a batch that is fuller takes
longer in the same program."""
HEAVY_TOKENS = 256
SMALL = (64, 128)
"""Tokens of two packed shapes, one twice the other."""
SPREAD = 0.02
"""Standard deviation of random parameters, as BERT's."""


@dataclasses.dataclass
class Case:
    """A batch to time: these rows of tasks of class ``of``, or of none; bare ones that fill the bucket if not given."""

    program: ProgramKey
    of: ClassKey | None = None
    rows: OfTasks = (0, 0, 0)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """A short stack of layers with every class's bank; its times are scaled to the whole backbone.

    Its methods put the cases that they need among ``cases``, and return a function that computes their figure once each
    case was timed as often as the others.
    """

    def __init__(self, family: Family, mesh: MeshSlice, max_tokens: int) -> None:
        self._operators = family.operators
        self._most_tokens = max_tokens
        self._longest = family.config.max_positions
        self._heavy_tokens = min(HEAVY_TOKENS, max_tokens)
        self.family, self._short = shortened(family)
        network = self.family.network
        self._scale = family.config.layers / network.config.layers
        params = _random_params(network, family.dtype)
        self.replica = Replica(self.family, params, mesh)
        most = _most_tasks()
        for key, _ in self.family.slots:
            if (part := class_method(key.method).typical(key, network.config)) is not None:
                arrays = slot_arrays(part, key, network.config, family.dtype, network.base_bias(params))
                for slot in range(1, 1 + most):
                    self.replica.write({key: (slot, arrays)})
        self.cases: dict[tuple[ProgramKey, ClassKey | None, OfTasks], Case] = {}
        self._rng = np.random.default_rng(0)

    def bare(self, bucket: Bucket) -> Callable[[], float]:
        """Seconds of the whole backbone. What a batch takes once, whatever its tokens and layers, is not scaled up: two
        small cases tell it."""
        case = self.case(bucket)
        sizes = SMALL if SMALL[-1] <= self._most_tokens else ()
        shapes = typical(sizes, min(LENGTHS[-1], self._longest))
        small = [self.case(Bucket(tokens, groups)) for tokens, groups in shapes]

        def found() -> float:
            once = 0.0
            if small and all(own.seconds for own in small):
                once = min(case.median, max(0.0, 2 * small[0].median - small[1].median))
            return once + (case.median - once) * self._scale

        return found

    def light(self, key: ClassKey) -> Callable[[], Grid]:
        """A window's cost grows with its cells, with any rows in it: proportional to n l. It has more cells than
        its rows have tokens."""
        variant = make_variant({self._short[key]: FULL})
        buckets = self._buckets(LIGHT_SHAPES)
        cells_a_token = 1.0 if class_method(key.method).kind == "row" else WINDOW
        pairs = [(self.case(bucket, variant), self.case(bucket)) for bucket in buckets]

        def found() -> Grid:
            cells = np.array([bucket.tokens for bucket in buckets], float)
            costs = self._class_scale(key) * np.array([_added(own, bare) for own, bare in pairs])
            rate = cells_a_token * float(np.dot(cells, costs) / np.dot(cells, cells))
            rows, lengths = np.array([1, ROWS[-1]]), np.array([1, LENGTHS[-1]])
            return Grid(rows, lengths, rate * rows[:, None] * lengths[None, :].astype(float))

        return found

    def heavy(self, key: ClassKey) -> Callable[[], Steps]:
        """The time that rows add to the program that runs without any of them; one program runs any number of rows."""
        bucket, needs = self._heavy_bucket(), {self._short[key]: FULL}
        variants = {run: make_variant(needs, run) for run in HEAVY_CASES}
        held = {
            run: [shape for shape in cases if bucket.holds(np.full(shape[0] * shape[1], shape[2]))]
            for run, cases in HEAVY_CASES.items()
        }
        timed = [
            (
                bucket.run(run),
                shape,
                self.case(bucket, variants[run], key, shape),
                self.case(bucket, variants[run], None, shapes[-1]),
            )
            for run, shapes in held.items()
            for shape in shapes
        ]

        def found() -> Steps:
            added = self._class_scale(key) * np.array([_added(own, bare) for *_, own, bare in timed])
            # The differences are as small as the noise. What is certain: a part for each task, one for each step over
            # its weights, and one for the tokens that the steps cover.
            steps = [tasks * -(-n * length // size) for size, (tasks, n, length), *_ in timed]
            terms = [(t[1][0], n, n * t[0]) for t, n in zip(timed, steps, strict=True)]
            weights = 1 / np.maximum(added, added.mean() / 4 or 1.0)
            parts, _ = nnls(np.array(terms, float) * weights[:, None], added * weights)
            return Steps(*parts.tolist())

        return found

    def replaced_share(self, key: ClassKey) -> Callable[[], float]:
        """The share of a batch's shared part that is saved when a mask on every row replaces the shared products."""
        bucket, needs = self._heavy_bucket(), {self._short[key]: FULL}
        short = bucket.groups[0][1]
        rows = (1, self._heavy_tokens // short, short)
        product = self.case(bucket, make_variant(needs), key, rows)
        replaced = self.case(bucket, make_variant(needs, replaced=True), key, rows)
        bare = self.case(bucket)
        return lambda: min(1.0, _added(product, replaced) / bare.median)

    def loop_share(self, key: ClassKey) -> Callable[[], float]:
        """How much slower programs become by having a loop over this class, without any row in it."""
        looped = make_variant({self._short[key]: FULL})
        pairs = [(self.case(bucket, looped), self.case(bucket)) for bucket in self._buckets(LOOP_SHAPES)]

        def found() -> float:
            return sum(_added(*pair) for pair in pairs) / sum(bare.median for _, bare in pairs)

        return found

    def of_class(self, key: ClassKey) -> Callable[[], ClassFigures]:
        """All figures of a class."""
        operators = self._operators.exceptions_of(str(key))
        if class_method(key.method).kind != "heavy":
            light = self.light(key)
            return lambda: ClassFigures(light(), operators=operators)
        steps, loop = self.heavy(key), self.loop_share(key)
        replaced = self.replaced_share(key) if replaces_weights(key) else lambda: 0.0

        def found() -> ClassFigures:
            own = steps()
            return ClassFigures(stepped_grid(own), loop(), replaced(), own, operators)

        return found

    def case(
        self,
        bucket: Bucket,
        variant: Variant | None = None,
        of: ClassKey | None = None,
        rows: OfTasks = (0, 0, 0),
    ) -> Case:
        """One figure may need what another one timed already."""
        key = (ProgramKey(bucket, variant or Variant()), of, rows)
        return self.cases.setdefault(key, Case(*key))

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

    def _rows(self, case: Case) -> list[Row]:
        network = self.family.network
        tasks, rows, length = case.rows
        if not tasks:
            return full_rows(case.program.bucket, network)
        slots = [{self._short[case.of]: 1 + number // rows} if case.of else {} for number in range(tasks * rows)]
        return [Row(network.sample(self._rng, length), own, 0, length) for own in slots]

    def run_of(self, case: Case, program: Program) -> Callable[[], object]:
        """Runs a case's batch, which is assembled once, and waits for its end."""
        assembled = self.replica.assemble(self._rows(case), program)
        return lambda: jax.block_until_ready(self.replica.try_out(program, assembled))


def shortened(family: Family) -> tuple[Family, dict[ClassKey, ClassKey]]:
    """The family of a short stack of layers with room for the measured tasks; what became of each class."""
    layers = min(family.config.layers, max(2, -(-STACK_WEIGHTS // family.config.layer_weights())))
    short = {key: _shortened(key, layers, family.config.layers / layers) for key, _ in family.slots}
    slots = dict.fromkeys(short.values(), 1 + _most_tasks())  # two classes may become equal when they are shortened
    operators = family.operators.renamed({str(key): str(own) for key, own in short.items()})
    network, slots_of = family.network.shortened(layers), tuple(sorted(slots.items()))
    return dataclasses.replace(family, network=network, slots=slots_of, operators=operators), short


def bench_bytes(family: Family, mesh: MeshSlice) -> int:
    """Bytes of a bench's arrays on each device, before there is one."""
    short, _ = shortened(family)
    params = short.network.abstract_params(short.dtype)
    backbone = param_bytes(short.network, params, short.dtype, mesh)
    return backbone + banks_bytes(dict(short.slots), short.config, short.dtype, mesh)


def _most_tasks() -> int:
    return max(tasks for cases in HEAVY_CASES.values() for tasks, _, _ in cases)


def _added(own: Case, other: Case) -> float:
    """By how much ``own`` takes longer. Both ran once in each round, so a machine that slows down for a while does so
    for both."""
    return max(0.0, statistics.median(np.subtract(own.seconds, other.seconds)))


def _random_params(network: Network, dtype: DType) -> Params:
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        return (rng.standard_normal(leaf.shape, np.float32) * np.float32(SPREAD)).astype(leaf.dtype)

    params: Params = jax.tree.map(draw, network.abstract_params(dtype))
    return params


def _shortened(key: ClassKey, layers: int, scale: float) -> ClassKey:
    """The class on a share of its layers, in a stack of ``layers``."""
    if not key.layers:
        return key
    count = max(1, min(layers, round(len(key.layers) / scale)))
    return dataclasses.replace(key, layers=tuple(range(count)))
