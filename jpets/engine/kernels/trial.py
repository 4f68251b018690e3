"""One candidate tried out: compiled, compared with the reference on fresh random numbers, and timed in turn with the
usual one."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpets.engine.kernels.calls import Call, Operator, Sample, is_array
from jpets.errors import one_line

log = logging.getLogger(__name__)

MOST = {"bfloat16": 3e-2, "float32": 1e-4}
"""Largest difference from the reference, as a share of its largest number."""
TYPICAL = {"bfloat16": 1e-2, "float32": 2e-5}
"""The same for the root of the mean square. One of 3,072 inputs left out makes 1.8e-2."""
ROUNDS = 7
LEAST_SECONDS = 2e-3
"""A turn lasts about so long: it repeats the call as often as that takes, so that starting it does not count."""
MOST_REPEATS = 64
CALLS = 16
"""In one launch on an accelerator: to start a call alone takes a host longer than most operators take."""
NO_ROOM = "RESOURCE_EXHAUSTED"
SAMPLES = 2
"""Fresh operands with which a candidate is compared."""


class Outcome(NamedTuple):
    """``seconds`` of a call; ``ratio`` of the usual candidate's seconds to them, in turns, 0 where that did not run.
    ``out`` says why a candidate was not timed, and is empty for one that was."""

    seconds: float = 0.0
    ratio: float = 0.0
    out: str = ""

    def __str__(self) -> str:
        beside = f", {self.ratio:.2f} x the usual speed" if self.ratio else ""
        return self.out or f"{1e3 * self.seconds:.3g} ms{beside}"


class Program(NamedTuple):
    """A compiled candidate. A run of it makes the call so many times."""

    run: Callable[[Sample], jax.Array]
    calls: int


class Trials:
    """Tries the candidates of one call on ``device``. Those after the ``usual`` one, by default the reference, are
    timed beside it. Raises what the reference raises."""

    def __init__(
        self, operator: Operator, call: Call, device: jax.Device, seed: int = 0, *, usual: str | None = None
    ) -> None:
        self._operator = operator
        self._call = call
        self._device = device
        self._calls = 1 if device.platform == "cpu" else CALLS
        rng = np.random.default_rng(seed)
        self.samples = [self._placed(operator.sample(call, rng)) for _ in range(SAMPLES)]
        self._usual = usual or operator.reference
        self._reference = self.compiled(operator.reference, 1)
        self.expected = [np.asarray(self._reference.run(sample), np.float32) for sample in self.samples]
        self._base = self._repeated(operator.reference) if self._usual == operator.reference else None

    def outcome(self, name: str, clock: Callable[[], float] = time.perf_counter) -> Outcome | None:
        """What becomes of a candidate. Its errors are a reason, not raised; None where the device had no room for it,
        which says nothing about it."""
        try:
            program = self._repeated(name)
            for sample, expected in zip(self.samples, self.expected, strict=True):
                if wrong := difference(np.asarray(program.run(sample), np.float32), expected, sample, self.dtype):
                    return Outcome(out=wrong)
            if name == self._usual:  # only a right one is timed beside others, and none pays for its compilation
                self._base = program
            return self._timed(program, self._base, clock)
        except Exception as error:  # lowering, compiling and running may raise anything
            log.debug("a candidate failed", exc_info=True)
            if NO_ROOM in str(error):
                return None
            return Outcome(out=f"{type(error).__name__}: {one_line(error)[:300]}")

    @property
    def dtype(self) -> str:
        """The number format of what comes in, the first operand: products are computed in it."""
        return "float32" if jnp.dtype(self._call.operands[0].dtype) == jnp.float32 else "bfloat16"

    def _repeated(self, name: str) -> Program:
        """A program that makes a call as often as it is timed. A reference that takes long by itself may loop: it is
        not compiled again, nor run sixteen times."""
        if name != self._operator.reference:
            return self.compiled(name, self._calls)
        begun = time.perf_counter()
        jax.block_until_ready(self._reference.run(self.samples[0]))
        fast = time.perf_counter() - begun < LEAST_SECONDS and self._calls > 1
        return self.compiled(name, self._calls) if fast else self._reference

    def compiled(self, name: str, calls: int = 1) -> Program:
        candidate = self._operator.candidates[name].compute
        leaves, tree = jax.tree.flatten((self.samples[0].operands, dict(self.samples[0].settings)))
        arrays = [at for at, leaf in enumerate(leaves) if is_array(leaf)]

        def once(given: list[Any]) -> jax.Array:
            """Numbers and words among the operands are part of the program, as they are in the engine's."""
            whole = list(leaves)
            for at, array in zip(arrays, given, strict=True):
                whole[at] = array
            operands, settings = jax.tree.unflatten(tree, whole)
            return candidate(*operands, **settings)

        def call(given: list[Any]) -> jax.Array:
            def again(_: object, found: jax.Array) -> jax.Array:
                inputs, _ = jax.lax.optimization_barrier((given, found))  # tied: no call can be left out
                return once(inputs)

            return jax.lax.fori_loop(0, calls - 1, again, once(given))

        compiled = jax.jit(call).lower([leaves[at] for at in arrays]).compile()

        def run(sample: Sample) -> jax.Array:
            flat = jax.tree.leaves((sample.operands, dict(sample.settings)))
            result: jax.Array = compiled([flat[at] for at in arrays])
            return result

        return Program(run, calls)

    def _placed(self, sample: Sample) -> Sample:
        def placed(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.device_put(leaf, self._device) if is_array(leaf) else leaf, tree)

        return dataclasses.replace(sample, operands=placed(sample.operands), settings=placed(dict(sample.settings)))

    def _timed(self, program: Program, base: Program | None, clock: Callable[[], float]) -> Outcome:
        sample = self.samples[0]

        def turn(each: Program, repeats: int) -> float:
            begun = clock()
            for _ in range(repeats):
                last = each.run(sample)
            jax.block_until_ready(last)
            return (clock() - begun) / (repeats * each.calls)

        systems = [program] if base is None or base is program else [program, base]
        repeats = [
            int(np.clip(LEAST_SECONDS / (each.calls * max(turn(each, 1), 1e-9)), 1, MOST_REPEATS)) for each in systems
        ]
        turns = [[turn(each, count) for each, count in zip(systems, repeats, strict=True)] for _ in range(ROUNDS)]
        seconds = statistics.median(each[0] for each in turns)
        if base is None:
            return Outcome(seconds)
        return Outcome(seconds, statistics.median(each[-1] / each[0] if each[0] else 1.0 for each in turns))


def _same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two arrays have the same bits, NaN apart: devices write it in different ones."""
    both = np.isnan(found) & np.isnan(expected)
    return bool((both | (found.view(np.uint32) == expected.view(np.uint32))).all())


def difference(found: np.ndarray, expected: np.ndarray, sample: Sample, dtype: str) -> str:
    """How a result differs from the reference's beyond the tolerance; empty if it does not."""
    if found.shape != expected.shape:
        return f"its result has the shape {found.shape}, the reference's {expected.shape}"
    own = np.ones(found.shape[0], bool) if sample.own is None else sample.own
    if sample.kept is not None and not _same(found[~own], np.asarray(sample.kept, np.float32)[~own]):
        return "it changes rows that are not its own"
    mine, theirs = found[own].astype(np.float64), expected[own].astype(np.float64)
    if mine.size == 0:
        return ""
    if not np.isfinite(mine).all():
        return "it reads numbers that are not its own: there are NaN or infinities in its result"
    largest, mean_square = np.abs(theirs).max(), np.sqrt(np.square(theirs).mean())
    most = float(np.abs(mine - theirs).max() / max(largest, 1e-30))
    typical = float(np.sqrt(np.square(mine - theirs).mean()) / max(mean_square, 1e-30))
    if most > MOST[dtype] or typical > TYPICAL[dtype]:
        return (
            f"its result differs from the reference's by {most:.2g} of the largest number, {typical:.2g} in the mean "
            f"square; {MOST[dtype]:g} and {TYPICAL[dtype]:g} are allowed"
        )
    return ""
