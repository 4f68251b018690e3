"""How an engine's programs become ready: loaded or compiled, run once, and given to its replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import jax

from jpets.engine.costs.cost_table import CostTable, full_batch, measure
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import Program, ProgramKey, compile_program
from jpets.engine.programs.store import ProgramStore

log = logging.getLogger(__name__)

COARSE_REPEATS = 2
"""Timed runs of each core program at a first start; ``jpets profile`` measures better."""


class Programs:
    """``wait`` waits for work staged with a replica as long as there is a thread that can do it."""

    def __init__(
        self,
        replica: Replica,
        store: ProgramStore,
        costs: CostTable,
        wait: Callable[[Future[None]], None],
    ) -> None:
        self._replica = replica
        self._store = store
        self._costs = costs
        self._wait = wait

    def prepare(self, key: ProgramKey) -> None:
        """Before the replica's threads run: loads or compiles a program, and runs it. The first run is slow, and its
        cost must be known."""
        known = self._costs.get(key)
        repeats = COARSE_REPEATS if known is None else 0
        program = self._store.load(self._replica.family, key)
        if program is not None:
            try:
                seconds = measure(self._replica, program, repeats)
            except jax.errors.JaxRuntimeError:
                log.exception("a stored program does not run and is compiled again")
                self._store.forget(self._replica.family, key)
                program = None
        if program is None:
            program = self._compile(key)
            seconds = measure(self._replica, program, repeats)
        program.seconds = seconds if known is None else known
        self._costs.set(key, program.seconds)
        self._replica.add_program(program)

    def get(self, key: ProgramKey) -> Program:
        """The program, compiled now if it is not stored."""
        return self._store.load(self._replica.family, key) or self._compile(key)

    def add(self, program: Program) -> None:
        """A program that comes while queries are served runs once beside their batches before it gets any."""
        program.seconds = self._costs.estimate(program.key)
        self._try_out(program)
        self._replica.add_program(program)

    def keep_costs(self) -> None:
        """Writes down what programs were found to cost while queries ran in them."""
        for program in self._replica.programs:
            if program.followed:  # a mere estimate must not pass for a measurement
                self._costs.set(program.key, program.seconds)
        self._costs.save()

    def _try_out(self, program: Program) -> None:
        """The first run, several times as long as later ones: a CPU's code is linked by then. Runs that this thread
        starts do not hold up the owner's. Several devices must all start the same runs in one order: the owner's."""
        assembled = full_batch(self._replica, program)
        if len(self._replica.mesh.devices) == 1:
            jax.block_until_ready(self._replica.try_out_beside(program, assembled))
        else:
            run = partial(self._replica.try_out, program, assembled)
            self._wait(self._replica.staging.stage(lambda: jax.block_until_ready(run())))

    def _compile(self, key: ProgramKey) -> Program:
        """A program compiled here and kept; one that was loaded must not be kept again, it would lack its code."""
        program = compile_program(self._replica.family, key, self._replica.mesh)
        self._store.save(self._replica.family, program)
        return program
