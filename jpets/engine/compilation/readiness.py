"""How an engine's programs become ready: loaded or compiled, run once, and given to its replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import jax

from jpets.engine.costs.cost_table import CostTable, full_batch, measure
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import Family, Program, ProgramKey, compile_program, whole_family
from jpets.engine.programs.store import ProgramStore

log = logging.getLogger(__name__)

COARSE_REPEATS = 3
"""Timed runs of each core program at a first start; batches correct them."""


class Programs:
    """``wait`` waits for work staged with a replica as long as there is a thread that can do it."""

    def __init__(
        self,
        replica: Replica,
        store: ProgramStore,
        costs: CostTable,
        wait: Callable[[Future[None]], None],
        *,
        alike: bool = False,
    ) -> None:
        """``alike``: a stored program is only taken where it is made of functions as the family's are, as others give
        other bits."""
        self._load = store.load if alike else store.load_best
        self._replica = replica
        self._store = store
        self._costs = costs
        self._wait = wait

    def prepare(self, key: ProgramKey) -> None:
        """Loads or compiles a program, and runs it, before the replica's threads run: the first run is slow, and the
        cost must be known."""
        known = self._costs.get(key)
        repeats = COARSE_REPEATS if known is None else 0
        program = self._load(self._replica.family, key)
        if program is not None:
            try:
                seconds = measure(self._replica, program, repeats)
            except jax.errors.JaxRuntimeError:
                log.exception("a stored program does not run and is compiled again")
                self._store.forget_best(self._replica.family, key)
                program = None
        if program is None:
            program = self._compile(self._replica.family, key)
            seconds = measure(self._replica, program, repeats)
        program.seconds = program.expected = seconds if known is None else known
        self._costs.set(key, program.seconds)
        self._replica.add_program(program)

    def get(self, key: ProgramKey) -> Program:
        """The program, compiled now if it is not stored."""
        return self._load(self._replica.family, key) or self._compile(self._replica.family, key)

    def get_whole(self, key: ProgramKey) -> Program:
        """The program as one function, compiled so now if it is not stored."""
        family = whole_family(self._replica.family)
        return self._store.load(family, key) or self._compile(family, key)

    def exchange(self, program: Program) -> None:
        """A program as one function takes the place of the one that is served, unless that has left."""
        self._try_out(program)
        for own in self._replica.programs:
            if own.key == program.key:
                with self._costs.pace.lock:
                    former = own.exchange(program)
                del former  # while nobody waits for the lock

    def add(self, program: Program) -> None:
        """A program that comes while queries are served runs once beside their batches before it gets its own."""
        program.expected = self._costs.estimate(program.key)
        program.seconds = program.expected * self._costs.pace.now  # as it was wanted by
        self._try_out(program)
        self._replica.add_program(program)

    def _try_out(self, program: Program) -> None:
        """The first run, which takes several times as long as later ones: a CPU's code is linked in it. Runs on this
        thread do not hold up the owner. Several devices must all start the same runs in the same order: the owner's."""
        assembled = full_batch(self._replica, program)
        if len(self._replica.mesh.devices) == 1:
            jax.block_until_ready(self._replica.try_out_beside(program, assembled))
        else:
            run = partial(self._replica.try_out, program, assembled)
            self._wait(self._replica.staging.stage(lambda: jax.block_until_ready(run())))

    def _compile(self, family: Family, key: ProgramKey) -> Program:
        """Compiles a program here and stores it. A loaded program must not be stored again: it would lack its code."""
        program = compile_program(family, key, self._replica.mesh)
        self._store.save(family, program)
        return program
