"""Rows held out: drawn by the seed, and copies of a text together, unless few texts have most rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.training.holding_out import hold_out

TEXTS = st.lists(st.integers(0, 6), min_size=2, max_size=40)


@given(TEXTS, st.integers(1, 39), st.integers(0, 5))
def test_copies_of_a_text_stay_together(texts: list[int], count: int, seed: int) -> None:
    count = min(count, len(texts) - 1)
    learnt, held_out = hold_out(texts, count, seed)
    assert sorted([*learnt, *held_out]) == list(range(len(texts))) and learnt and held_out
    if {texts[at] for at in learnt} & {texts[at] for at in held_out}:
        assert len(held_out) == count and max(Counter(texts).values()) > count / 2
    else:
        fewest = min(Counter(texts[at] for at in learnt).values())
        assert max(count / 2, count + 1 - fewest) <= len(held_out) <= count


def test_few_texts_with_many_copies_are_parted() -> None:
    learnt, held_out = hold_out(["a"] * 10 + ["b"] * 10 + ["c"], 6, 0)
    assert len(held_out) == 6 and len(learnt) == 15


@pytest.mark.parametrize("count", [1, 7, 29])
def test_rows_of_different_texts_are_drawn_one_by_one(count: int) -> None:
    order = np.random.default_rng([3, 30]).permutation(30)
    learnt, held_out = hold_out([f"text {at}" for at in range(30)], count, 3)
    assert held_out == order[:count].tolist() and learnt == order[count:].tolist()
