"""The cost of delta work: all tasks of a batch have steps of one length."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.engine.batch.bucket import HEAVY_RUNS, Bucket
from jpets.engine.batch.bucket import SETUP_TOKENS as ENGINE_SETUP
from jpets.scheduling.costs.deltas import RUNS, SETUP_TOKENS, DeltaTables
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, Steps

AXIS = np.array([1, 1000])
MASK, DIFF, LIGHT = Steps(0.001, 0.050, 0.001), Steps(0.0, 0.003, 0.0), 0.0001
KINDS = (("mask",), ("diff", "bias"), ("bias",))


def profile() -> CostProfile:
    light = Grid(AXIS, AXIS, LIGHT * AXIS[:, None] * AXIS[None, :])
    heavy = Grid(AXIS, AXIS, np.full((2, 2), 7.0))  # not used where the steps are known
    return CostProfile(
        light,
        (),
        {"mask": heavy, "diff": heavy, "bias": light},
        frozenset({"mask", "diff"}),
        steps={"mask": MASK, "diff": DIFF},
    )


def expected(tasks: list[tuple[int, list[int]]], padded_to: int) -> float:
    """One batch of tasks, each with the lengths of its rows, by the layout's own rules."""
    choices = []
    for run in HEAVY_RUNS:
        size = Bucket(64 * padded_to, ((64, padded_to),)).run(run) if padded_to else run
        seconds = work = 0.0
        for kind, lengths in tasks:
            if kind == 2:
                continue
            if not padded_to:
                steps = -(-sum(lengths) // size)
            elif size >= padded_to:
                steps = -(-((len(lengths) - 1) * padded_to + lengths[-1]) // size)
            else:
                steps = sum(-(-length // size) for length in lengths)
            own = (MASK, DIFF)[kind]
            seconds += own.task + steps * (own.step + own.token * size)
            work += steps * (SETUP_TOKENS + size)
        choices.append((work, seconds))
    light = sum(LIGHT * (max(lengths) * len(lengths) if padded_to else sum(lengths)) for kind, lengths in tasks if kind)
    return min(choices)[1] + light


def test_the_planner_and_the_layout_know_the_same_steps() -> None:
    assert RUNS == HEAVY_RUNS and SETUP_TOKENS == ENGINE_SETUP


@pytest.mark.parametrize("padded_to", [0, 16, 32, 64, 200])
def test_all_tasks_of_a_batch_have_steps_of_one_length(padded_to: int) -> None:
    """Rows of a task have equal lengths here: which of them stands last is the layout's affair."""
    tables = DeltaTables(profile(), KINDS, rows=64, longest=256, tokens=4096)
    rng = np.random.default_rng(padded_to)
    batches = []
    for _ in range(20):
        tasks = []
        for _ in range(int(rng.integers(1, 6))):
            length = int(rng.integers(1, (padded_to or 100) + 1))
            tasks.append((int(rng.integers(3)), [length] * int(rng.integers(1, 8))))
        batches.append(tasks)
    entries = [(at, kind, len(n), sum(n), max(n)) for at, tasks in enumerate(batches) for kind, n in tasks]
    batch, kind, rows, tokens, longest = np.array(entries).T
    found = tables.of_tasks(batch, kind, rows, tokens, longest, np.full(len(batches), padded_to))
    assert found == pytest.approx(sum(expected(tasks, padded_to) for tasks in batches))


def test_a_kind_whose_steps_are_not_known_costs_its_beta() -> None:
    known = dataclasses.replace(profile(), steps={"diff": DIFF})
    tables = DeltaTables(known, KINDS, rows=8, longest=32, tokens=64)
    one = np.ones(1, np.int_)
    for padded_to in (0, 32):
        assert tables.of_tasks(0 * one, 0 * one, 2 * one, 40 * one, 20 * one, padded_to * one) == 7.0
    assert tables.heavy_by_run(32)[1, 40] == pytest.approx(DIFF.seconds(np.array([40]), 32)[0])


@pytest.mark.parametrize("parts", [(-1.0, 0.0, 0.0), (0.0, np.inf, 0.0), (0.0, 0.0, np.nan)])
def test_steps_without_sense_are_refused(parts: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Steps(*parts)


CONVEX = CostProfile(
    profile().alpha,
    (),
    {"mask": Grid(AXIS, np.array([1, 100, 1000]), np.array([[0.1, 0.2, 9.0], [50.0, 100.0, 9000.0]]))},
    frozenset({"mask"}),
)
"""Without steps, and dearer for each token the more there are."""


@pytest.mark.parametrize("known", [profile(), CONVEX], ids=["steps", "grid"])
@given(parts=st.lists(st.tuples(st.integers(1, 300), st.sampled_from(RUNS)), min_size=1, max_size=4))
def test_no_way_to_divide_a_task_undercuts_its_bound(known: CostProfile, parts: list[tuple[int, int]]) -> None:
    tables = DeltaTables(known, (("mask",),), rows=8, longest=64, tokens=1200)
    whole = sum(tokens for tokens, _ in parts)
    divided = sum(float(tables.heavy_by_run(run)[0, tokens]) for tokens, run in parts)
    assert 0 < tables.heavy_least[0, whole] <= divided * (1 + 1e-9)
    assert tables.heavy_least[0, 0] == 0.0 and not tables.heavy_least[1].any()
