"""Cost profiles: interpolation, what they refuse, and the way to disk and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint

ROWS, LENGTHS = np.array([1, 4, 16]), np.array([8, 32, 128, 512])

seconds = st.floats(0, 10)
grids = st.lists(st.lists(seconds | st.none(), min_size=4, max_size=4), min_size=3, max_size=3).filter(
    lambda lines: lines[0][0] is not None
)


def grid(lines: list[list[float | None]]) -> Grid:
    return Grid(ROWS, LENGTHS, np.array([[np.nan if cell is None else cell for cell in line] for line in lines], float))


@given(
    grids, st.lists(st.integers(1, 40), min_size=2, max_size=6), st.lists(st.integers(1, 700), min_size=2, max_size=6)
)
def test_costs_rise_with_rows_and_length(lines: list[list[float | None]], rows: list[int], lengths: list[int]) -> None:
    costs = grid(lines).at(sorted(rows), sorted(lengths))
    assert np.all(np.isfinite(costs)) and np.all(costs >= 0)
    slack = 1e-9 * (1 + costs.max())
    assert np.all(np.diff(costs, axis=0) >= -slack) and np.all(np.diff(costs, axis=1) >= -slack)


def test_gaps_along_an_edge_are_flat() -> None:
    """Heavy deltas of many rows cost little more than those of the few that were timed: in proportion, plans would
    keep them in small batches."""
    costs = grid([[1.0, 2.0, None, None], [4.0, 8.0, None, None], [None] * 4]).filled
    assert costs[0].tolist() == [1.0, 2.0, 2.0, 2.0] and costs[:, 0].tolist() == [1.0, 4.0, 4.0]
    assert costs[2].tolist() == [4.0, 8.0, 8.0, 8.0]


def test_measured_points_are_kept_and_products_are_exact() -> None:
    """Bilinear interpolation is exact for a cost of a + b N + c N L."""
    n, length = ROWS[:, None].astype(float), LENGTHS[None].astype(float)
    exact = Grid(ROWS, LENGTHS, 1 + 2 * n + 3e-3 * n * length)
    assert np.array_equal(exact.at(ROWS, LENGTHS), exact.seconds)
    assert exact.at([7], [100])[0, 0] == pytest.approx(1 + 14 + 3e-3 * 700)
    assert exact.at([20], [100])[0, 0] == pytest.approx(exact.at([16], [100])[0, 0] * 20 / 16)


def profile() -> CostProfile:
    n, length = ROWS[:, None].astype(float), LENGTHS[None].astype(float)
    seconds = 1e-3 + 1e-5 * n * length + 2e-9 * n * length**2
    seconds[2, 3] = np.nan
    points = (PackedPoint(64, ((2, 32),), 2e-3), PackedPoint(256, ((8, 32), (1, 64)), 5e-3))
    beta = {"lora": grid([[0.0, 1.0, 2.0, None]] * 3)}
    return CostProfile(Grid(ROWS, LENGTHS, seconds), points, beta, frozenset({"lora"}), 0.25, {"lora": 0.5})


def test_attention_is_told_from_the_linear_part() -> None:
    assert profile().attention_rate == pytest.approx(2e-9, rel=1e-6)


def test_packed_costs_pass_through_what_was_measured() -> None:
    own = profile()
    for point in own.packed:
        assert float(own.packed_seconds(point.tokens, point.cells)) == pytest.approx(point.seconds)
    assert float(own.packed_seconds(100, 0)) <= float(own.packed_seconds(101, 0))


def test_to_disk_and_back() -> None:
    own = profile()
    again = CostProfile.from_json(own.to_json())
    assert again.to_json() == own.to_json()
    assert np.array_equal(again.alpha.seconds, own.alpha.seconds, equal_nan=True)


def broken(**changes: object) -> str:
    return json.dumps({**json.loads(profile().to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        profile().to_json()[:200],
        "[]",
        "null",
        broken(format=0),
        broken(alpha={"rows": [1], "lengths": [8], "seconds": [[-1.0]]}),
        broken(alpha={"rows": [1], "lengths": [8], "seconds": [[None]]}),
        broken(alpha={"rows": [1], "lengths": [8], "seconds": [["x"]]}),
        broken(alpha={"rows": [4, 1], "lengths": [8], "seconds": [[1.0], [1.0]]}),
        broken(alpha={"rows": [1], "lengths": [8, 16], "seconds": [[1.0]]}),
        broken(packed=[{"tokens": 8, "groups": [[1, 8]], "seconds": -1.0}]),
        broken(heavy=["other"]),
        broken(heavy_loop=-0.5),
        broken(replaced={"lora": 1.5}),
        broken(replaced={"other": 0.5}),
        profile().to_json().replace("0.25", "NaN"),
        profile().to_json().replace("0.002", "Infinity"),
    ],
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CostProfile.from_json(text)
