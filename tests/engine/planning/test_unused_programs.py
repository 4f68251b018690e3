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

    def runs(self, program: Program, seconds: float, batches: int, every: float = 0.01) -> None:
        """So many batches, one ``every`` so many seconds."""
        for _ in range(batches):
            self.wait(every)
            program.last_used = self._clock.monotonic()
            CostTable.follow(self.costs, program, seconds)
            self.ready.together([])

    def use_cheapest(self, times: tuple[float, float], batches: int, every: float = 0.01) -> float:
        """Of so many batches each runs in the cheaper one of the two smaller programs, which take so many times as long
        as they should. Returns the share of the larger one."""
        larger = 0
        for _ in range(batches):
            if self.small.seconds <= self.middle.seconds:
                self.runs(self.small, 0.003 * times[0], 1, every)
            else:
                self.runs(self.middle, 0.004 * times[1], 1, every)
                larger += 1
        return larger / batches

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


@pytest.mark.parametrize("gain", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("every", [0.01, 0.1])
def test_faster_code_is_no_faster_machine(machine: Machine, gain: float, every: float) -> None:
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    machine.runs(machine.middle, 0.004, 200)
    machine.middle.exchange(Program(machine.middle.key, mock.Mock()))
    machine.runs(machine.middle, 0.004 * (1 - gain), 300, every)
    assert machine.small.seconds == pytest.approx(0.003, rel=0.02)


def test_a_machine_that_is_slow_in_bursts_is_not_taken_for_a_slower_one(machine: Machine) -> None:
    """It is slow while much comes, and quiet while little does."""
    machine.runs(machine.middle, 0.004, 3 * SETTLED)
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    for _ in range(8):
        assert machine.use_cheapest((1.5, 1.5), 500) < 0.02
        assert machine.use_cheapest((1.0, 1.0), 60, every=1.05) < 0.05
    assert machine.middle.seconds == pytest.approx(0.004, rel=0.25)


def test_a_machine_that_was_much_slower_for_a_while_is_what_it_was(machine: Machine) -> None:
    """By more than programs are ever taken to be slower."""
    machine.runs(machine.middle, 0.004, 3 * SETTLED)
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    machine.use_cheapest((8.0, 8.0), 1000)
    assert machine.use_cheapest((1.0, 1.0), 1000) < 0.05
    assert machine.middle.seconds == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("every", [0.3, 0.5, 1.05, 3.0])
@pytest.mark.parametrize("took", [(0.006, 0.0045), (0.0045, 0.004)])
def test_what_was_measured_wrong_at_the_start_is_found_out(
    machine: Machine, every: float, took: tuple[float, float]
) -> None:
    """The cheapest of two always runs; which one that is its batches tell, however few."""
    small, middle = took
    for program in machine.programs:
        program.best = math.inf
    assert machine.use_cheapest((small / 0.003, middle / 0.004), 1500, every) > 0.85


def test_a_program_that_becomes_slower_alone_is_left(machine: Machine) -> None:
    """It alone tells how fast the machine is; what others take at best is not forgotten."""
    machine.runs(machine.middle, 0.004, 3 * SETTLED)
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    assert machine.use_cheapest((2.0, 1.0), 6000, every=1.05) > 0.85


def test_what_ran_before_a_pause_says_nothing_of_the_machine(machine: Machine) -> None:
    machine.runs(machine.middle, 0.004, 3 * SETTLED)
    machine.runs(machine.small, 0.003, 3 * SETTLED)
    machine.ready.together([])
    for _ in range(10):
        CostTable.follow(machine.costs, machine.small, 0.006)
    machine.wait(3600.0)
    machine.runs(machine.small, 0.003, 2)
    assert machine.middle.seconds == pytest.approx(0.004, rel=0.05)


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
    machine.runs(machine.middle, 0.004, 100 * (int(UNUSED_SECONDS) + 3))
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
