"""Counts of n-grams that do not fit in memory, beside a plain counter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jpets.errors import Conflict, InvalidInput
from jpets.plot.counting import NgramCounter
from jpets.plot.ngrams import MOST_IDS, Window, grams_of, keys_of


@hypothesis.given(st.data(), st.sampled_from([2, 3, 5]), st.integers(1, 40))
def test_counts_are_exact_and_the_most_frequent_come_first(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, buffered: int
) -> None:
    window, ids = Window.of(size), st.sampled_from([0, 1, 2, MOST_IDS])
    batches = data.draw(st.lists(st.lists(st.tuples(*[ids] * size), max_size=20), max_size=6))
    counter = NgramCounter(tmp_path_factory.mktemp("counts"), window, buffered=buffered)
    for batch in batches:
        counter.add(np.array(batch, np.int64).reshape(-1, size))
    expected = Counter(gram for batch in batches for gram in batch)
    found = dict[tuple[int, ...], int]()
    for part in counter.counts():
        grams = grams_of(part["key"], size)
        found |= {tuple(gram): int(count) for gram, count in zip(grams.tolist(), part["count"], strict=True)}
    assert found == expected and counter.total == expected.total()
    share = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    kept = [tuple(gram) for gram in grams_of(counter.most_frequent(share), size).tolist()]
    ranked = sorted(expected, key=lambda gram: (-expected[gram], gram))
    assert kept == sorted(ranked[: len(kept)])
    occurrences = [expected[gram] for gram in ranked]
    assert sum(occurrences[: len(kept)]) >= share * counter.total
    assert not kept or sum(occurrences[: len(kept) - 1]) < share * counter.total, "no more than needed"


def test_few_ngrams_are_in_memory_at_a_time(tmp_path: Path) -> None:
    counter = NgramCounter(tmp_path, Window.of(3), buffered=1000)
    rng = np.random.default_rng(0)
    for _ in range(50):
        counter.add(rng.integers(0, 1000, (500, 3)))
        assert counter._size < 1000
    parts = [len(part) for part in counter.counts()]
    assert sum(parts) > 20_000 and max(parts) < 2 * sum(parts) / len(parts), "spread evenly over the files"


def test_what_an_earlier_run_left_is_not_counted_again(tmp_path: Path) -> None:
    counter = NgramCounter(tmp_path, Window.of(2), buffered=1)
    counter.add(np.ones((3, 2), np.int64))
    with pytest.raises(Conflict, match="must be empty"):
        NgramCounter(tmp_path, Window.of(2))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_other_shares_are_refused(share: float, tmp_path: Path) -> None:
    counter = NgramCounter(tmp_path, Window.of(2))
    counter.add(np.ones((3, 2), np.int64))
    with pytest.raises(InvalidInput, match="0 to 1"):
        counter.most_frequent(share)
    assert len(keys_of(np.ones((1, 2), np.int64))) == len(counter.most_frequent(0.1))
