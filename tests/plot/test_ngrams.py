"""N-grams of packed texts and their keys, beside plain loops."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jpets.errors import InvalidInput
from jpets.plot.ngrams import MOST_IDS, Window, grams_of, keys_of, ngrams, shortened

WINDOWS = [Window.of(size, causal=causal) for size in (2, 3, 5) for causal in (False, True)]
IDS = st.integers(0, MOST_IDS - 1)


@hypothesis.given(st.lists(st.lists(IDS, max_size=7), max_size=4), st.sampled_from(WINDOWS))
def test_no_ngram_crosses_from_one_text_into_another(texts: list[list[int]], window: Window) -> None:
    expected = [
        [text[at] + 1 if 0 <= at < len(text) else 0 for at in range(own - window.before, own + window.after + 1)]
        for text in texts
        for own in range(len(text))
    ]
    ids = np.array([id for text in texts for id in text], np.int32)
    text_of_token = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    found = ngrams(ids, text_of_token, window)
    assert found.tolist() == expected and found.shape == (len(ids), window.size)


@hypothesis.given(st.sampled_from([2, 3, 5]), st.data())
def test_keys_sort_as_ngrams_do_and_give_them_back(size: int, data: st.DataObject) -> None:
    some = st.sampled_from([0, 1, 2, 255, 256, MOST_IDS])  # zero bytes at the end of a key, and all bits set
    drawn = data.draw(st.lists(st.tuples(*[some | st.integers(0, MOST_IDS)] * size), min_size=1, max_size=30))
    grams = np.array(drawn, np.int64)
    keys = keys_of(grams)
    assert keys.dtype == Window.of(size).key_dtype
    assert (grams_of(keys, size) == grams).all()
    assert [drawn[at] for at in np.argsort(keys, kind="stable")] == sorted(drawn)
    assert (np.unique(keys) == keys_of(np.array(sorted(set(drawn)), np.int64))).all()


def test_what_is_missing_falls_back_to_fewer_neighbours() -> None:
    assert Window.of(3).shorter == [(0, 1), (0, 0)]  # SkipBERT's order: (0, x, next), then (0, x, 0)
    assert Window.of(2).shorter == [(0, 0)]
    assert Window.of(5).shorter == [(1, 2), (1, 1), (0, 1), (0, 0)]
    assert Window.of(3, causal=True).shorter == [(1, 0), (0, 0)]
    grams = np.array([[1, 2, 3, 4, 5]])
    assert [shortened(grams, Window.of(5), *each).tolist() for each in [(1, 2), (0, 1), (0, 0)]] == [
        [[0, 2, 3, 4, 5]],
        [[0, 0, 3, 4, 0]],
        [[0, 0, 3, 0, 0]],
    ]


@pytest.mark.parametrize("size", [0, 1, 4, 6, -3])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(InvalidInput, match="2, 3 or 5"):
        Window.of(size)
