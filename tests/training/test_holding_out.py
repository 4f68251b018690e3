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
    judged_by, learnt_from = {texts[at] for at in held_out}, Counter(texts[at] for at in learnt)
    if held_out == np.random.default_rng([seed, len(texts)]).permutation(len(texts)).tolist()[:count]:
        assert not judged_by & set(learnt_from) or max(Counter(texts).values()) >= count / 2
    else:
        assert not judged_by & set(learnt_from) and len(judged_by) >= min(count, 2)
        assert max(count / 2, count + 1 - min(learnt_from.values())) <= len(held_out) <= count


def test_few_texts_with_many_copies_are_parted() -> None:
    learnt, held_out = hold_out(["a"] * 10 + ["b"] * 10 + ["c"], 6, 0)
    assert len(held_out) == 6 and len(learnt) == 15


def test_one_text_alone_is_not_all_that_is_held_out() -> None:
    texts = [text for text in "abcdefgh" for _ in range(12)]
    learnt, held_out = hold_out(texts, 12, 0)
    assert len(held_out) == 12 and len({texts[at] for at in held_out}) > 2 and len(learnt) == 84


@pytest.mark.parametrize("count", [1, 7, 29])
def test_rows_of_different_texts_are_drawn_one_by_one(count: int) -> None:
    order = np.random.default_rng([3, 30]).permutation(30)
    learnt, held_out = hold_out([f"text {at}" for at in range(30)], count, 3)
    assert held_out == order[:count].tolist() and learnt == order[count:].tolist()
