"""Balancing tasks between devices: Algorithm 3 to the letter, the better moves against brute force, the interval."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.balancing.balance import (
    EPSILON,
    Balanced,
    Move,
    balance,
    gap,
    greedy,
    improved,
)
from jpets.scheduling.balancing.room import Room
from jpets.scheduling.balancing.rounds import AdaptiveInterval, Allowance, Window

Placement = list[list[int]]


def numbered(counts: Sequence[Sequence[int]]) -> tuple[Placement, dict[int, int]]:
    """A placement of tasks 0, 1, ... with these calls, as the paper writes it."""
    number = itertools.count()
    placement = [[next(number) for _ in own] for own in counts]
    return placement, dict(enumerate(itertools.chain(*counts)))


def loads_of(placement: Sequence[Sequence[int]], calls: Mapping[int, float]) -> list[float]:
    places = [task for held in placement for task in held]
    return [math.fsum(calls.get(task, 0) / places.count(task) for task in held) for held in placement]


def replay(placement: Placement, moves: Sequence[Move[int]]) -> list[Placement]:
    """The placement before the first move and after each."""
    every = [[list(held) for held in placement]]
    for task, source, target, copy in moves:
        after = [list(held) for held in every[-1]]
        assert source != target and task in after[source] and task not in after[target]
        after[target].append(task)
        if not copy:
            after[source].remove(task)
        every.append(after)
    return every


def descending(loads: Iterable[float]) -> list[float]:
    return sorted((round(load, 6) for load in loads), reverse=True)


def check(placement: Placement, calls: Mapping[int, float], found: Balanced[int]) -> None:
    """The result is what the moves lead to; each makes the load vector better and none the gap larger."""
    every = [loads_of(each, calls) for each in replay(placement, found.moves)]
    assert [sorted(held) for held in found.placement] == [sorted(held) for held in replay(placement, found.moves)[-1]]
    assert found.loads == pytest.approx(every[-1])
    assert sum(found.loads) == pytest.approx(sum(calls.values()))
    for before, after in itertools.pairwise(every):
        assert descending(after) < descending(before)
        assert gap(after) <= gap(before) + 1e-6


cases = st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=5).map(numbered)
small = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=2, max_size=3).map(numbered)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Placement, dict[int, int]]:
    """Cases in which some tasks stand on several devices."""
    placement, calls = draw(cases)
    for task in draw(st.sets(st.sampled_from(sorted(calls)), max_size=3)) if calls else ():
        device = draw(st.integers(0, len(placement) - 1))
        if task not in placement[device]:
            placement[device].append(task)
    return placement, calls


@pytest.mark.parametrize(
    ("counts", "printed", "better"),
    [
        ([[0, 6, 4], [0]], 10, 2),
        ([[5, 5], [5, 5], [], []], 10, 0),
        ([[4, 6], []], 2, 2),
        ([[1, 2, 3], [6]], 0, 0),
        ([[], []], 0, 0),
        ([[3]], 0, 0),
    ],
)
def test_cases_of_the_paper(counts: list[list[int]], printed: float, better: float) -> None:
    placement, calls = numbered(counts)
    assert greedy(placement, calls).gap == printed
    assert improved(placement, calls).gap == better


def test_greedy_moves_the_least_called_of_the_most_loaded() -> None:
    placement, calls = numbered([[5, 1, 2], [0], [3]])
    found = greedy(placement, calls)
    assert found.moves == (Move(1, 0, 1), Move(2, 0, 1))
    assert found.loads.tolist() == [5, 3, 3]


@given(replicated())
def test_each_move_of_greedy_shrinks_the_gap(case: tuple[Placement, dict[int, int]]) -> None:
    found = greedy(*case)
    check(*case, found)
    gaps = [gap(loads_of(each, case[1])) for each in replay(case[0], found.moves)]
    assert all(after < before for before, after in itertools.pairwise(gaps))


@given(replicated(), st.booleans())
def test_each_move_of_improved_is_better_and_the_end_no_worse_than_greedy(
    case: tuple[Placement, dict[int, int]], copies: bool
) -> None:
    found, plain = improved(*case, copies=copies), greedy(*case)
    check(*case, found)
    assert copies or not any(move.copy for move in found.moves)
    assert all(case[1][move.task] > 0 for move in found.moves)
    assert max(found.loads) <= max(plain.loads) + 1e-6
    assert found.gap <= plain.gap + 1e-6


@given(replicated(), st.data())
def test_memory_and_budget_hold_at_every_move(case: tuple[Placement, dict[int, int]], data: st.DataObject) -> None:
    placement, calls = case
    sizes = {task: data.draw(st.integers(0, 3)) for task in calls}
    free = data.draw(st.lists(st.integers(0, 4), min_size=len(placement), max_size=len(placement)))
    budget = data.draw(st.integers(0, 12))
    found = improved(placement, calls, Room(sizes, free, budget))
    check(placement, calls, found)
    room = [own + sum(sizes[task] for task in held) for own, held in zip(free, placement, strict=True)]
    for each in replay(placement, found.moves):
        taken = [sum(sizes[task] for task in held) for held in each]
        assert all(used <= own for used, own in zip(taken, room, strict=True))
    assert found.moved == sum(sizes[move.task] for move in found.moves) <= budget


@given(replicated(), st.data())
def test_places_hold_though_old_ones_serve_until_all_moves_are_over(
    case: tuple[Placement, dict[int, int]], data: st.DataObject
) -> None:
    placement, calls = case
    takes = {task: data.draw(st.sets(st.sampled_from("abc"), max_size=2)) for task in calls}
    kinds = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))
    places = [data.draw(kinds) for _ in placement]
    sizes = {task: 2 * len(own) for task, own in takes.items()}
    budget = data.draw(st.integers(0, 12))
    found = improved(placement, calls, Room(sizes, None, budget, takes, places))
    check(placement, calls, found)
    came = [Counter[str]() for _ in placement]
    for move in found.moves:
        came[move.target].update(takes[move.task])
    for each, own in zip(came, places, strict=True):
        assert all(count <= own.get(kind, 0) for kind, count in each.items())
    assert found.moved <= budget and found.gap <= gap(loads_of(placement, calls)) + 1e-6


def test_what_a_round_has_no_bytes_for_waits_for_the_next() -> None:
    placement, calls = numbered([[4, 4, 4, 4], []])
    allowance, rounds = Allowance(rate=5.0, most=4.0), list[int]()
    for _ in range(3):
        allowance.grow(1.0)
        found = improved(placement, calls, Room(dict.fromkeys(calls, 8.0), budget=allowance.left))
        allowance.spend(found.moved)
        placement = [list(held) for held in found.placement]
        rounds.append(len(found.moves))
    assert rounds == [0, 1, 0] and allowance.left == 7.0
    allowance.grow(100.0)
    assert allowance.left == 20.0
    with pytest.raises(ValueError, match="above 0"):
        Allowance(rate=0.0, most=1.0)


def one_move_away(placement: Sequence[Sequence[int]], calls: Mapping[int, float]) -> list[list[float]]:
    """The loads after each single move that there is."""
    every = []
    for source, target in itertools.permutations(range(len(placement)), 2):
        for task in placement[source]:
            if task not in placement[target]:
                every.append(loads_of(replay([list(h) for h in placement], [Move(task, source, target)])[-1], calls))
    return every


@given(replicated())
def test_a_move_is_the_best_single_one_and_none_is_left(case: tuple[Placement, dict[int, int]]) -> None:
    placement, calls = case
    found = improved(placement, calls, copies=False)
    assert min(map(descending, one_move_away(found.placement, calls)), default=[math.inf]) >= descending(found.loads)
    if found.moves and not greedy(placement, calls).moves:
        first = replay(placement, found.moves[:1])[-1]
        assert descending(loads_of(first, calls)) == min(map(descending, one_move_away(placement, calls)))


@given(small)
def test_most_loaded_device_beside_the_best_of_all_assignments(case: tuple[Placement, dict[int, int]]) -> None:
    """Where no single move is better, the most loaded device of m has at most 2 - 2 / (m + 1) times as much as in the
    best assignment (Finn and Horowitz 1979), and with one task a device or fewer it is the best."""
    placement, calls = case
    devices = len(placement)
    found = improved(placement, calls, copies=False)
    best = math.inf
    for places in itertools.product(range(devices), repeat=len(calls)):
        loads = np.bincount(places, weights=list(calls.values()), minlength=devices) if calls else np.zeros(devices)
        best = min(best, float(loads.max()))
    assert best <= max(found.loads) <= (2 - 2 / (devices + 1)) * best + 1e-6
    if sum(count > 0 for count in calls.values()) <= devices:
        assert max(found.loads) == best


def test_a_task_hotter_than_a_device_is_replicated() -> None:
    placement, calls = [[0, 1], [2], [3], [4]], {0: 90, 1: 3, 2: 2, 3: 2, 4: 3}
    assert max(improved(placement, calls, copies=False).loads) == 90
    found = improved(placement, calls)
    assert sum(move.copy for move in found.moves) == 3 and max(found.loads) == 25.5
    held = improved(placement, calls, Room(free=[0, 1, 0, 0]))
    assert [move.target for move in held.moves if move.copy] == [1]


@given(replicated(), st.data())
def test_standing_load_counts_but_does_not_move(case: tuple[Placement, dict[int, int]], data: st.DataObject) -> None:
    placement, calls = case
    standing = data.draw(st.lists(st.integers(0, 20), min_size=len(placement), max_size=len(placement)))
    found, plain = improved(placement, calls, standing=standing), greedy(placement, calls, standing=standing)
    vectors = [np.add(loads_of(each, calls), standing).tolist() for each in replay(placement, found.moves)]
    assert found.loads == pytest.approx(vectors[-1])
    assert all(descending(after) < descending(before) for before, after in itertools.pairwise(vectors))
    assert max(found.loads) <= max(plain.loads) + 1e-6
    assert found.gap <= plain.gap + 1e-6


def test_what_is_within_the_slack_stays() -> None:
    placement, calls = numbered([[5, 5, 5], [3, 3]])
    assert improved(placement, calls, slack=9).moves == ()
    assert improved(placement, calls, slack=8).moves != ()


def test_many_tasks() -> None:
    rng = np.random.default_rng(0)
    placement = np.array_split(rng.permutation(4096), 64)
    calls = dict(enumerate(rng.poisson(2.0, 4096).tolist()))
    found = improved([held.tolist() for held in placement], calls)
    assert found.gap <= 1
    assert found.moved == len(found.moves) < 700


@pytest.mark.parametrize(("loads", "phi"), [([2, 4], 0.5), ([0, 3], 0.0), ([0, 0], 1.0), ([7], 1.0), ([5, 5, 5], 1.0)])
def test_balance(loads: list[float], phi: float) -> None:
    assert balance(loads) == phi


def test_interval_halves_while_unbalanced_and_grows_while_balanced() -> None:
    interval = AdaptiveInterval()
    down = [interval.start]
    while down[-1] > interval.least:
        down.append(interval.following(down[-1], 0.5))
    assert down == [10, 5, 2.5, 1.25, 0.625, 0.3125, 0.2]
    assert interval.following(0.2, 0.89) == 0.2
    assert interval.following(0.2, 0.9) == 0.7
    assert interval.following(19.8, 1.0) == interval.following(20.0, 1.0) == 20.0


def test_window_counts_calls_and_mean_queue_lengths_and_forgets() -> None:
    window = Window[str](2)
    window.add(0, "a", 3)
    window.add(1, "a")
    window.add(1, "b", 2)
    window.observe(0, 4, 1.0)
    window.observe(0, 1, 2.0)
    assert window.calls() == {"a": 4, "b": 2}
    assert window.loads().tolist() == [3, 3]
    assert window.queue_lengths().tolist() == [2, 0]
    assert balance(window.loads()) == 1 and balance(window.queue_lengths()) == 0
    assert window.seconds == 3.0
    window.reset(keep=0.25)
    assert window.calls() == {"a": 1, "b": 0.5} and window.queue_lengths().tolist() == [2, 0]
    window.observe(0, 6, 0.75)
    assert window.seconds == 1.5 and window.queue_lengths()[0] == 4
    window.reset()
    assert window.calls() == {} and not window.loads().any() and not window.queue_lengths().any()


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        greedy([], {})
    with pytest.raises(ValueError, match="once for each device"):
        improved([[1, 1]], {1: 2})
    with pytest.raises(ValueError, match="finite and not negative"):
        improved([[1]], {1: -2})
    with pytest.raises(ValueError, match="must stand on a device"):
        greedy([[1], []], {1: 1, 2: 3})
    with pytest.raises(ValueError, match="free room for each of 2 devices, got 1"):
        improved([[1], []], {1: 1}, Room(free=[1]))
    with pytest.raises(ValueError, match="free room for each of 2 devices, got 3"):
        improved([[1], []], {1: 1}, Room(places=[{}, {}, {}]))
    with pytest.raises(ValueError, match="standing load of at least 0 for each of 2 devices"):
        improved([[1], []], {1: 1}, standing=[1.0])
    with pytest.raises(ValueError, match="must not be negative"):
        Room({"a": -1})
    with pytest.raises(ValueError, match="finite load"):
        balance([1, float("nan")])
    with pytest.raises(ValueError, match="least <= start <= most"):
        AdaptiveInterval(least=11.0)
    with pytest.raises(ValueError, match="one device or more"):
        Window[str](0)


def test_loads_of_equal_size_are_equal() -> None:
    """Shares of replicated tasks are fractions: rounding alone must not move a task."""
    placement, calls = [[0, 1], [0, 2], [0, 3]], {0: 1, 1: 0.1, 2: 0.1 + EPSILON / 10, 3: 0.1}
    assert improved(placement, calls).moves == ()
