"""Taking hot tasks out of a batch: what it saves is what the batches cost before and after."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.policies.hot import worth_taking_out

LIGHT = [Shape(tokens, ((tokens // 4, 32),), 0.010 + 0.001 * tokens) for tokens in (32, 64, 128, 256, 512)]
LOOPED = [Shape(shape.tokens, shape.groups, 1.2 * shape.seconds) for shape in LIGHT]
NAMES = ("a", "b", "c")


def batch_seconds(lengths: list[int], heavy: bool) -> float:
    """The cheapest shape that has the tokens and the rows."""
    shapes = LOOPED if heavy else LIGHT
    fitting = [s.seconds for s in shapes if sum(lengths) <= s.tokens and len(lengths) <= s.groups[0][0]]
    return min(fitting, default=0.0) if lengths else 0.0


def total(queries: list[tuple[str | None, int]], added: dict[str, float], out: set[str]) -> float:
    """Seconds of the mixed batch of the tasks that stay, and of one batch for each task that leaves."""
    stay = [(owner, length) for owner, length in queries if owner not in out]
    seconds = batch_seconds([n for _, n in stay], any(owner is not None for owner, _ in stay))
    seconds += sum(added[owner] for owner in added if owner not in out)
    return seconds + sum(batch_seconds([n for owner, n in queries if owner == name], False) for name in out)


queries = st.lists(st.tuples(st.sampled_from([*NAMES, None]), st.integers(1, 32)), min_size=1, max_size=12)
costs = st.dictionaries(st.sampled_from(NAMES), st.floats(0, 0.5), min_size=3)


@given(queries, costs)
def test_what_is_said_to_be_saved_is_saved(mixed: list[tuple[str | None, int]], each: dict[str, float]) -> None:
    added = {owner: each[owner] for owner, _ in mixed if owner is not None}
    saved = worth_taking_out([o for o, _ in mixed], [n for _, n in mixed], added, LIGHT, LOOPED)
    assert all(gain > 0 for gain in saved.values())
    before, after = total(mixed, added, set()), total(mixed, added, set(saved))
    assert sum(saved.values()) == pytest.approx(before - after)


@given(queries, costs)
def test_who_is_not_a_candidate_stays(mixed: list[tuple[str | None, int]], each: dict[str, float]) -> None:
    """A task without a copy keeps the mixed batch's loops where they are."""
    present = {owner for owner, _ in mixed if owner is not None}
    for candidates in itertools.chain.from_iterable(itertools.combinations(sorted(present), k) for k in (0, 1)):
        added = {owner: each[owner] for owner in candidates}
        saved = worth_taking_out([o for o, _ in mixed], [n for _, n in mixed], added, LIGHT, LOOPED)
        assert set(saved) <= set(candidates)


@given(queries, costs)
def test_no_number_of_the_dearest_saves_more(mixed: list[tuple[str | None, int]], each: dict[str, float]) -> None:
    added = {owner: each[owner] for owner, _ in mixed if owner is not None}
    saved = worth_taking_out([o for o, _ in mixed], [n for _, n in mixed], added, LIGHT, LOOPED)
    dearest = sorted(added, key=lambda owner: -added[owner])
    least = min(total(mixed, added, set(dearest[:count])) for count in range(len(dearest) + 1))
    assert total(mixed, added, set(saved)) == pytest.approx(least)


def test_nothing_is_said_of_what_no_shape_takes() -> None:
    """A batch that fits none, parts that fit none, and both: the cost of neither is known."""
    few = [shape for shape in LIGHT if shape.tokens <= 64]
    for owners, lengths, light, looped in (
        (["a", "b"], [40, 40], LIGHT, few),
        (["a", None], [40, 20], [], LOOPED),
        (["a", "a", None], [60, 60, 20], few, few),
    ):
        added = {owner: 0.3 for owner in owners if owner is not None}
        assert not worth_taking_out(owners, lengths, added, light, looped)


def test_a_dear_delta_leaves_and_a_cheap_one_stays() -> None:
    owners, lengths = ["a", "b", None, None], [32, 2, 20, 20]
    saved = worth_taking_out(owners, lengths, {"a": 0.3, "b": 0.001}, LIGHT, LIGHT)
    assert list(saved) == ["a"]


def test_two_leave_where_one_alone_would_leave_the_shape_as_it_is() -> None:
    """128 tokens cost what 66 cost: only both together make room for the smaller shape."""
    owners, lengths = ["a", "b", None, None], [32, 32, 32, 32]
    dear = {"a": 0.041, "b": 0.041}
    assert worth_taking_out(owners, lengths, dear, LIGHT, LIGHT) == pytest.approx({"a": 0.031, "b": 0.031})
    assert worth_taking_out(owners, lengths, {"a": 0.041}, LIGHT, LIGHT) == {}
