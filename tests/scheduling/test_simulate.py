"""The simulated devices: no query is lost, the clock is honest, and the paper's shapes hold at a small scale."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpets.scheduling.balancing.balance import Move
from jpets.scheduling.balancing.rounds import AdaptiveInterval, Window
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint
from jpets.scheduling.costs.policy_lookup import Costs, Limits
from jpets.scheduling.simulate.cluster import Cluster, Link
from jpets.scheduling.simulate.run import Outcome, simulate
from jpets.scheduling.simulate.systems import SYSTEMS, System, by_greedy, by_greedy_as_printed, by_improved
from jpets.scheduling.simulate.traffic import Traffic, draw_traffic

ROWS, LENGTHS = np.array([1, 8, 32, 128]), np.array([8, 32, 128])
SIZES = np.array([5e6, 1e7])


def grid(base: float, token: float) -> Grid:
    return Grid(ROWS, LENGTHS, base + token * ROWS[:, None] * LENGTHS[None].astype(float))


PROFILE = CostProfile(
    grid(5e-2, 5e-4),
    tuple(PackedPoint(t, ((t // 16, 32),), 5e-2 + 5e-4 * t) for t in (64, 512, 4096)),
    {"lora": grid(0.0, 1e-5), "mask": grid(1e-2, 1e-5)},
    frozenset({"mask"}),
    0.1,
)
COSTS = Costs(PROFILE, Limits(rows=128, tokens=2048, longest=128), [("lora",), ("mask",)])


def cluster(devices: int, tasks: int) -> Cluster:
    kinds = np.arange(tasks) % 2
    return Cluster(devices, kinds, SIZES[kinds], COSTS)


def run(devices: int, tasks: int, system: System, queries: int = 2000, *, seed: int = 0, load: float = 1.0) -> Outcome:
    made = cluster(devices, tasks)
    traffic = draw_traffic(tasks, queries, load * made.rate(0, windows=4), seed=seed)
    return simulate(made, traffic, made.deal(seed), system)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(5, 40),
    st.sampled_from(sorted(SYSTEMS)),
    st.integers(0, 9),
    st.sampled_from([0.5, 1.0, 1.5]),
)
def test_every_query_is_answered_once_after_it_came(
    devices: int, tasks: int, name: str, seed: int, load: float
) -> None:
    quick = dataclasses.replace(SYSTEMS[name], interval=AdaptiveInterval(start=0.2))
    found = run(devices, tasks, quick, 600, seed=seed, load=load)
    assert np.all(found.latencies > 0)
    assert np.all((found.served_by >= 0) & (found.served_by < devices))
    assert np.all((found.utilisation >= 0) & (found.utilisation <= 1))
    for device in range(devices):
        ends = np.unique(found.answered[found.served_by == device])
        assert len(ends) == 0 or found.busy[device] <= ends[-1]
    assert devices > 1 or not any(each.moves for each in found.rounds)


@pytest.mark.parametrize("name", ["adaptive", "ours"])
def test_equal_seeds_give_equal_results(name: str) -> None:
    one, other = [run(4, 32, SYSTEMS[name], 4000) for _ in range(2)]
    assert np.array_equal(one.answered, other.answered) and one.rounds == other.rounds
    assert not np.array_equal(one.answered, run(4, 32, SYSTEMS[name], 4000, seed=1).answered)


def test_a_query_is_served_where_its_task_stands() -> None:
    made = cluster(3, 24)
    traffic = draw_traffic(24, 1000, made.rate(0, windows=4), seed=0)
    placement = made.deal(0)
    home = {task: device for device, held in enumerate(placement) for task in held}
    still = simulate(made, traffic, placement, SYSTEMS["none"])
    assert still.served_by.tolist() == [home[task] for task in traffic.tasks.tolist()]
    assert set(simulate(made, traffic, placement, SYSTEMS["anywhere"]).served_by.tolist()) == {0, 1, 2}


def test_a_lone_query_takes_what_its_batch_is_predicted_to_take() -> None:
    made = cluster(2, 4)
    traffic = Traffic(np.array([1.0, 9.0]), np.array([0, 0]), np.array([32, 32]))
    found = simulate(made, traffic, [[0, 1], [2, 3]], SYSTEMS["none"])
    ((seconds, _),) = made.batches(np.array([32]), np.array([0]))
    assert found.latencies == pytest.approx([seconds, seconds])
    assert found.busy == pytest.approx([2 * seconds, 0])


def test_a_round_takes_its_bytes_and_the_old_place_serves_until_it_is_over() -> None:
    moves = [Move(0, 0, 1), Move(1, 0, 1, copy=True)]
    link = Link(setup=0.05, bandwidth=1e9, write=1e-3)
    assert link.seconds(moves, SIZES, 2, first=False) == pytest.approx(0.015 + 0.002)
    assert link.seconds(moves, SIZES, 2, first=True) == pytest.approx(0.067)
    slow = dataclasses.replace(cluster(2, 16), link=Link(setup=2.0, bandwidth=1e9, write=0.0))
    traffic = draw_traffic(16, 4000, slow.rate(0, windows=4), seed=3)
    # Everything stands on the first device, so the first round moves what it can.
    found = simulate(slow, traffic, [list(range(16)), []], System(by_improved, AdaptiveInterval(start=1.0)))
    first = found.rounds[0]
    assert first.moves > 0 and first.seconds > 2
    assert np.all(found.served_by[traffic.arrived < first.at + first.seconds] == 0)
    assert np.any(found.served_by[traffic.arrived >= first.at + first.seconds] == 1)


def seen(made: Cluster, placement: list[list[int]], calls: list[int]) -> Window[int]:
    """A window of one second with these calls and no waiting queries."""
    window = Window[int](made.devices)
    for device, held in enumerate(placement):
        window.observe(device, 0.0, 1.0)
        for task in held:
            if calls[task]:
                window.add(device, task, calls[task])
    return window


def test_improved_keeps_to_the_memory() -> None:
    made, placement = cluster(2, 8), [[0, 1, 2, 3], [4, 5, 6, 7]]
    window = seen(made, placement, [90, 80, 70, 60, 5, 5, 5, 5])
    free = by_improved(made, placement, window).balanced
    assert len(free.moves) > 1
    for memory in (3.0e7, 3.5e7, 4.0e7):
        found = by_improved(dataclasses.replace(made, memory=memory), placement, window).balanced
        assert all(float(made.sizes[list(held)].sum()) <= memory for held in found.placement)
        assert found.gap >= free.gap
    assert by_improved(dataclasses.replace(made, memory=3.0e7), placement, window).balanced.moves == ()


def test_algorithm_3_over_the_tasks_that_were_called_and_as_printed() -> None:
    made, placement = cluster(2, 4), [[0, 1, 2], [3]]
    window = seen(made, placement, [0, 6, 4, 0])
    assert by_greedy_as_printed(made, placement, window).balanced.moves == ()
    found = by_greedy(made, placement, window).balanced
    assert found.moves == (Move(2, 0, 1),)
    assert [sorted(held) for held in found.placement] == [[0, 1], [2, 3]]


def test_ours_works_a_backlog_off_and_leaves_chance_alone() -> None:
    made, placement = cluster(2, 8), [[0, 1, 2, 3], [4, 5, 6, 7]]
    window = seen(made, placement, [26, 25, 24, 25, 23, 25, 24, 24])
    assert by_improved(made, placement, window).balanced.moves == ()
    window.observe(0, 2000.0, 1.0)
    moves = by_improved(made, placement, window).balanced.moves
    assert moves and all(move.source == 0 for move in moves)


def test_a_task_hotter_than_a_device_is_shared() -> None:
    """One task has nine calls of ten: without replicas one device does nearly everything."""
    made = cluster(4, 16)
    rng = np.random.default_rng(0)
    arrived = np.sort(rng.uniform(0, 4000 / made.rate(0, windows=4), 4000))
    tasks = np.where(rng.random(4000) < 0.9, 0, rng.integers(0, 16, 4000))
    traffic = Traffic(arrived, tasks, np.full(4000, 32))
    system = dataclasses.replace(SYSTEMS["ours"], interval=AdaptiveInterval(start=0.5))
    alone = simulate(made, traffic, made.deal(0), SYSTEMS["none"])
    shared = simulate(made, traffic, made.deal(0), system)
    assert sum(each.copies for each in shared.rounds) >= 2
    assert shared.throughput > 2 * alone.throughput


def gains(devices: int, tasks: int, names: list[str], redraw: float = np.inf, seeds: int = 2) -> dict[str, float]:
    """Mean throughput over that without migration, of 30 s of traffic at what the devices serve."""
    made = cluster(devices, tasks)
    rate = made.rate(0, windows=4)
    found: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        traffic = draw_traffic(tasks, int(30 * rate), rate, seed=seed, redraw=redraw)
        outcomes = {name: simulate(made, traffic, made.deal(seed), SYSTEMS[name]) for name in ("none", *names)}
        for name in names:
            found[name].append(outcomes[name].throughput / outcomes["none"].throughput - 1)
    return {name: statistics.mean(each) for name, each in found.items()}


def test_figure_13_gain_grows_with_devices_and_shrinks_with_tasks() -> None:
    four, eight, many = (gains(n, tasks, ["fixed", "ours"]) for n, tasks in ((4, 64), (8, 64), (8, 1024)))
    for name in ("fixed", "ours"):
        assert eight[name] > four[name] > 0
        assert eight[name] > many[name]
    assert all(each["ours"] >= each["fixed"] for each in (four, eight, many))


def test_figure_14_the_first_round_moves_most() -> None:
    """Where tasks are called often enough in a round to be told apart."""
    runs = [run(8, 48, SYSTEMS["fixed"], 24_000, seed=seed).rounds for seed in range(2)]
    assert all(each.seconds < 0.12 for rounds in runs for each in rounds)
    first = statistics.mean(rounds[0].bytes for rounds in runs)
    assert first > 2 * statistics.mean(each.bytes for rounds in runs for each in rounds[1:])


def test_figure_15_an_adaptive_interval_wins_where_calls_change_fast() -> None:
    found = gains(8, 64, ["fixed", "adaptive", "ours"], redraw=4.0)
    assert found["ours"] > found["adaptive"] > found["fixed"]


def test_figure_15_a_fixed_interval_is_no_better_than_none_where_calls_change_faster() -> None:
    """The calls that it knows of are out of date."""
    found = gains(8, 128, ["fixed", "ours"], redraw=4.0, seeds=4)
    assert found["fixed"] < 0.02 < 0.05 < found["ours"]


@pytest.mark.parametrize(("devices", "tasks"), [(4, 64), (3, 25)])
def test_devices_start_with_equally_many_tasks_of_each_kind(devices: int, tasks: int) -> None:
    made = cluster(devices, tasks)
    dealt = made.deal(3)
    assert sorted(task for held in dealt for task in held) == list(range(tasks))
    for of_kind in [made.kinds == kind for kind in np.unique(made.kinds)] + [np.ones(tasks, bool)]:
        counts = [int(of_kind[held].sum()) for held in dealt]
        assert max(counts) - min(counts) <= 1
    assert made.deal(3) == dealt != made.deal(4)


def test_what_cannot_be_simulated_is_refused() -> None:
    made = cluster(2, 4)
    traffic = draw_traffic(4, 10, 100.0, seed=0)
    with pytest.raises(ValueError, match="tasks of 2 devices, got 1"):
        simulate(made, traffic, [[0, 1, 2, 3]], SYSTEMS["none"])
    with pytest.raises(ValueError, match="task 3 does not"):
        simulate(made, traffic, [[0, 1], [2]], SYSTEMS["none"])
    with pytest.raises(ValueError, match="at least one device"):
        dataclasses.replace(made, devices=0)
    with pytest.raises(ValueError, match="one entry for each task"):
        dataclasses.replace(made, sizes=np.ones(3))
