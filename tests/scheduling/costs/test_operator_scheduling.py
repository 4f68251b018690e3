"""PET operator scheduling: Algorithm 2 of PetS and the rule of its section 6.3.3."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.costs.operators import Operator, assign_streams, interleave, stream_count

OPERATORS = st.lists(
    st.builds(
        Operator,
        st.just("op"),
        flops=st.integers(0, 10**6),
        bytes=st.integers(1, 10**3),
        seconds=st.floats(1e-6, 10.0),
    ),
    max_size=20,
)


def of_intensity(*values: float) -> list[Operator]:
    return [Operator(str(value), value, 1.0) for value in values]


def test_eight_operators_on_two_streams() -> None:
    assert assign_streams(of_intensity(*range(8)), 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert assign_streams(of_intensity(7, 0, 6, 1, 5, 2, 4, 3), 2) == [1, 0, 1, 0, 1, 0, 1, 0]


def test_equal_operators_keep_their_order() -> None:
    equal = of_intensity(3, 3, 3, 3)
    assert assign_streams(equal, 2) == [0, 0, 1, 1]
    assert interleave(equal, [0, 0, 1, 1]) == [0, 2, 1, 3]


def test_streams_take_turns_until_all_are_empty() -> None:
    assert interleave(of_intensity(0, 1, 2, 3, 4), [0, 0, 0, 1, 2]) == [0, 3, 4, 1, 2]
    assert interleave([], []) == assign_streams([], 3) == []


@given(OPERATORS)
def test_the_run_time_cancels_from_the_intensity_of_algorithm_2(operators: list[Operator]) -> None:
    for own in operators:
        assert own.intensity == pytest.approx((own.flops / own.seconds) / own.bandwidth)


@given(OPERATORS, st.integers(1, 40))
def test_every_operator_gets_one_stream_and_streams_are_even(operators: list[Operator], streams: int) -> None:
    assignment = assign_streams(operators, streams)
    assert len(assignment) == len(operators)
    counts = Counter(assignment)
    assert all(0 <= stream < streams for stream in counts)
    sizes = [counts[stream] for stream in range(streams)]
    assert max(sizes) - min(sizes) <= 1


@given(OPERATORS, st.integers(1, 40))
def test_intensity_never_falls_from_stream_to_stream(operators: list[Operator], streams: int) -> None:
    assignment = assign_streams(operators, streams)
    for own, mine in zip(operators, assignment, strict=True):
        for other, theirs in zip(operators, assignment, strict=True):
            assert mine >= theirs or own.intensity <= other.intensity


@given(OPERATORS, st.integers(1, 40))
def test_the_order_is_a_permutation_in_which_no_stream_gets_ahead(operators: list[Operator], streams: int) -> None:
    assignment = assign_streams(operators, streams)
    order = interleave(operators, assignment)
    assert sorted(order) == list(range(len(operators)))
    for end in range(len(order) + 1):
        launched = Counter(assignment[at] for at in order[:end])
        waiting = Counter(assignment[at] for at in order[end:])
        assert all(launched[stream] >= max(launched.values(), default=0) - 1 for stream in waiting)


@given(OPERATORS)
def test_two_streams_alternate_memory_bound_and_compute_bound(operators: list[Operator]) -> None:
    order = interleave(operators, assign_streams(operators, 2))
    memory_bound = [operators[at].intensity for at in order[0::2]]
    compute_bound = [operators[at].intensity for at in order[1::2]]
    assert not compute_bound or max(memory_bound) <= min(compute_bound)


@pytest.mark.parametrize(
    ("operators", "length", "rows_per_task", "expected"),
    [(128, 4, 1, 2), (128, 4, 16, 32), (128, 64, 1, 32), (128, 63, 1, 2), (5, 64, 4, 5), (1, 4, 1, 1), (0, 64, 4, 1)],
)
def test_short_batches_get_few_streams(operators: int, length: int, rows_per_task: int, expected: int) -> None:
    assert stream_count(operators, length, rows_per_task, threshold=64) == expected


def test_few_streams_are_never_more_than_many() -> None:
    assert stream_count(8, 4, 1, threshold=64, many=1) == 1


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one stream, got 0"):
        assign_streams(of_intensity(1), 0)
    with pytest.raises(ValueError, match="each of 2 operators, got 1"):
        interleave(of_intensity(1, 2), [0])
