"""What the times of programs become while other programs are used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import pytest

from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.costs import pace as pace_module
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.pace import SETTLED, UNUSED_SECONDS, Pace
from jpets.engine.planning import ready_programs
from jpets.engine.planning.ready_programs import ReadyPrograms
from jpets.engine.programs.program import Program, ProgramKey

BEGAN = 1000.0


class Replica:
    """Lone programs, and none of the classes that come later."""

    def __init__(self, programs: list[Program]) -> None:
        self.for_mixtures = programs
        self.generations = (mock.Mock(core=(), classes=frozenset()),)
        self.opened: frozenset[object] = frozenset()

    def has_program(self, key: ProgramKey) -> bool:
        return any(program.key == key for program in self.for_mixtures)


class Machine:
    """A clock, three programs that were timed at the start, and what is found about them: one of 32 tokens, one of 48,
    one of 64."""

    def __init__(self, clock: mock.Mock) -> None:
        self._clock = clock
        self.programs = [
            Program(ProgramKey(Bucket(n, ((1, n),)), Variant()), mock.Mock(), own, own, best=own, last_used=BEGAN)
            for n, own in ((32, 0.003), (48, 0.004), (64, 0.005))
        ]
        self.small, self.middle, self.large = self.programs
        self.costs = mock.Mock(pace=Pace(lambda: self.programs))
        self.ready = ReadyPrograms(Replica(self.programs), self.costs.pace)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        self._clock.monotonic.return_value += seconds

    def runs(self, program: Program, seconds: float, batches: int) -> None:
        """So many batches, a hundred a second."""
        for _ in range(batches):
            self.wait(0.01)
            program.last_used = self._clock.monotonic()
            CostTable.follow(self.costs, program, seconds)
            self.ready.together([])

    @property
    def cheapest(self) -> Program:
        return min(self.programs, key=lambda program: program.seconds)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, learning_costs: None) -> Iterator[Machine]:
    clock = mock.Mock(monotonic=mock.Mock(return_value=BEGAN))
    monkeypatch.setattr(pace_module, "time", clock)
    monkeypatch.setattr(ready_programs, "time", clock)
    yield Machine(clock)


def test_a_program_that_ran_on_a_busy_machine_is_tried_again(machine: Machine) -> None:
    """Both ran while the machine was busy; then only one of them, and the machine became quiet."""
    machine.runs(machine.small, 0.0066, 300)
    machine.runs(machine.middle, 0.0088, 300)
    machine.runs(machine.middle, 0.004, 200)
    assert machine.cheapest is machine.small, "what it took then says what the machine was like"


def test_other_programs_are_no_other_machine(machine: Machine) -> None:
    """One takes more than was expected of it, one less."""
    for _ in range(3):
        machine.runs(machine.small, 0.0036, 500)
        assert machine.small.seconds == pytest.approx(0.0036, rel=0.02)
        machine.runs(machine.large, 0.004, 500)
        assert machine.large.seconds == pytest.approx(0.004, rel=0.02)
    assert machine.small.seconds == pytest.approx(0.0036, rel=0.02)
    assert machine.costs.pace.drift == pytest.approx(1.0, rel=0.05)


def test_a_program_that_runs_now_and_then_follows_a_machine_that_is_busy_now_and_then(machine: Machine) -> None:
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    machine.runs(machine.middle, 0.004, 3 * SETTLED)
    for slow in (2.0, 1.0) * 4:
        machine.runs(machine.small, slow * 0.003, 1)
        machine.runs(machine.middle, slow * 0.004, 300)
        machine.runs(machine.small, slow * 0.003, 1)
        machine.runs(machine.middle, slow * 0.004, 200)
        assert machine.small.seconds == pytest.approx(slow * 0.003, rel=0.15)


def test_a_program_that_was_misjudged_is_no_slower_machine(machine: Machine) -> None:
    machine.large.best = math.inf  # it came later, by an estimate
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    machine.runs(machine.large, 0.0125, 300)
    assert machine.small.seconds == pytest.approx(0.003, rel=0.05)


def test_faster_code_is_no_faster_machine(machine: Machine) -> None:
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    machine.runs(machine.middle, 0.004, 200)
    machine.middle.exchange(Program(machine.middle.key, mock.Mock()))
    machine.runs(machine.middle, 0.0036, 300)
    assert machine.small.seconds == pytest.approx(0.003, rel=0.02)


def test_a_program_that_met_something_slow_fades_to_what_it_takes_at_best(machine: Machine) -> None:
    machine.runs(machine.small, 0.003, 2 * SETTLED)
    machine.runs(machine.small, 0.006, 10)
    slow = machine.small.seconds
    assert slow > machine.middle.seconds
    machine.runs(machine.middle, 0.004, 100)
    assert machine.small.seconds == pytest.approx(slow, rel=0.05), "not so soon"
    machine.runs(machine.middle, 0.004, 6000)
    assert machine.small.seconds == pytest.approx(0.003, rel=0.1)


def test_what_few_batches_told_fades_first(machine: Machine) -> None:
    machine.runs(machine.small, 0.009, 5)
    machine.runs(machine.large, 0.015, 2 * SETTLED)
    machine.large.best = 0.005
    machine.runs(machine.middle, 0.004, 100 * (int(UNUSED_SECONDS) + 10))
    assert machine.small.seconds == pytest.approx(0.003, rel=0.25)
    assert machine.large.seconds > 1.25 * 0.005


def test_a_program_in_use_keeps_its_time(machine: Machine) -> None:
    machine.runs(machine.small, 0.003, 2 * SETTLED)
    machine.runs(machine.small, 0.0045, 3000)
    assert machine.small.seconds == pytest.approx(0.0045, rel=0.01)


def test_nothing_is_known_of_a_program_without_a_time(machine: Machine) -> None:
    machine.large.seconds, machine.large.expected, machine.large.best = 0.0, 0.0, math.inf
    machine.runs(machine.middle, 0.004, 3000)
    assert machine.large.seconds == 0.0


def test_an_idle_hour_makes_all_that_was_slow_worth_trying(machine: Machine) -> None:
    machine.runs(machine.small, 0.003, 2 * SETTLED)
    machine.runs(machine.small, 0.006, 10)
    machine.wait(3600.0)
    machine.runs(machine.middle, 0.004, 200)
    assert machine.small.seconds == pytest.approx(0.003, rel=0.1)
