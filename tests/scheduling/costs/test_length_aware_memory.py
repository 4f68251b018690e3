"""Length-aware memory: no two tensors share bytes while both are needed, and chunks are kept."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.costs.memory_chunks import (
    DEFAULT_CHUNK,
    Placement,
    Usage,
    encoder_usages,
    find_gap,
    greedy_by_size,
    place_in_chunks,
    working_bytes,
)

MB = 2**20
sizes = st.one_of(st.integers(0, 100), st.integers(0, 3 * DEFAULT_CHUNK))
usage = st.builds(lambda at, lasts, size: Usage(at, at + lasts, size), st.integers(0, 12), st.integers(0, 6), sizes)
usages = st.lists(usage, max_size=14)
chunk_lists = st.lists(st.integers(1, 2 * DEFAULT_CHUNK), max_size=4)


def meet(a: Usage, b: Usage) -> bool:
    return not set(range(a.first_op, a.last_op + 1)).isdisjoint(range(b.first_op, b.last_op + 1))


def share(a: Usage, at: int, b: Usage, bt: int) -> bool:
    return a.size > 0 and b.size > 0 and at < bt + b.size and bt < at + a.size


def busiest(needed: list[Usage]) -> int:
    """The bytes that are needed at the same time: no placement has less."""
    return max((sum(u.size for u in needed if u.first_op <= op <= u.last_op) for op in range(20)), default=0)


def check(needed: list[Usage], placed: Placement) -> None:
    for usage, place in zip(needed, placed.places, strict=True):
        assert 0 <= place.offset <= place.offset + usage.size <= placed.chunks[place.chunk]
    for (a, p), (b, q) in itertools.combinations(zip(needed, placed.places, strict=True), 2):
        assert not (meet(a, b) and p.chunk == q.chunk and share(a, p.offset, b, q.offset))
    assert {place.chunk for place in placed.places} == set(range(len(placed.chunks)))
    assert placed.footprint >= busiest(needed)


@given(usages, chunk_lists)
def test_what_is_needed_at_the_same_time_never_shares_bytes(needed: list[Usage], chunks: list[int]) -> None:
    placed = place_in_chunks(needed, chunks)
    check(needed, placed)
    again = place_in_chunks(needed, placed.chunks)
    check(needed, again)


@given(usages)
def test_the_same_request_again_allocates_nothing(needed: list[Usage]) -> None:
    first = place_in_chunks(needed)
    assert first.allocated == first.footprint
    assert place_in_chunks(needed, first.chunks) == first._replace(allocated=0)


@given(usages)
def test_one_arena(needed: list[Usage]) -> None:
    offsets, footprint = greedy_by_size(needed)
    for (a, p), (b, q) in itertools.combinations(zip(needed, offsets, strict=True), 2):
        assert not (meet(a, b) and share(a, p, b, q))
    assert busiest(needed) <= footprint <= sum(usage.size for usage in needed)


def test_the_first_tensor_lies_at_the_start_of_an_empty_chunk() -> None:
    assert find_gap(Usage(0, 1, MB), 2 * MB, []) == 0
    placed = place_in_chunks([Usage(0, 1, MB)], [2 * MB])
    assert placed == ((((0, 0),)), (2 * MB,), 0)


def test_the_smallest_gap_is_taken_and_too_small_ones_are_not() -> None:
    held = [(10, Usage(0, 9, 10)), (26, Usage(0, 9, 10)), (50, Usage(0, 9, 10))]  # gaps of 10, 6 and 14, then the rest
    assert [find_gap(Usage(3, 3, size), 100, held) for size in (5, 6, 7, 10, 11, 14, 15, 40, 41)] == [
        *(20, 20, 0, 0, 36, 36, 60, 60, None)
    ]
    assert find_gap(Usage(10, 11, 90), 100, held) == 0  # later, when all are gone


def test_new_chunks_have_the_papers_sizes_and_unused_ones_go() -> None:
    placed = place_in_chunks([Usage(0, 1, 10 * MB), Usage(1, 2, 100)], [MB // 2, 4 * MB])
    assert placed.chunks == (MB // 2, 12 * MB)
    assert placed.allocated == 12 * MB
    assert place_in_chunks([], [MB]).chunks == ()


@pytest.mark.parametrize("usage", [Usage(0, 1, -1), Usage(2, 1, 5)])
def test_senseless_usages(usage: Usage) -> None:
    with pytest.raises(ValueError, match="a usage needs"):
        place_in_chunks([usage])


@given(st.lists(st.integers(0, 50 * MB), min_size=1, max_size=20), st.integers(1, 4))
def test_working_bytes_hold_the_largest_of_each(needs: list[int], at_a_time: int) -> None:
    largest = at_a_time * max(needs)
    assert largest <= working_bytes(needs, at_a_time) <= 1.2 * largest + at_a_time * (DEFAULT_CHUNK + 1)


def test_longer_requests_keep_the_chunks_of_shorter_ones() -> None:
    """Figure 6: from length 200 to 240 some chunks are new, and the others stay."""
    bert = {"layers": 12, "hidden": 768, "heads": 12, "intermediate": 3072, "rows": 1}
    short = place_in_chunks(encoder_usages(**bert, length=200))
    longer = place_in_chunks(encoder_usages(**bert, length=240), short.chunks)
    check(encoder_usages(**bert, length=240), longer)
    assert longer.chunks[: len(short.chunks)] == short.chunks
    assert 0 < longer.allocated < short.footprint
    every_tensor = sum(usage.size for usage in encoder_usages(**bert, length=240))
    assert longer.footprint < every_tensor / 8
