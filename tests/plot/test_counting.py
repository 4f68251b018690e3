"""Counts of n-grams that do not fit in memory, beside a plain counter, and counters that go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jpets.errors import InvalidInput
from jpets.files import TEMPORARY
from jpets.plot.counting import NgramCounter
from jpets.plot.ngrams import MOST_IDS, Window, grams_of, keys_of

SIZES = st.sampled_from([2, 3, 5])


def drawn_texts(data: st.DataObject, size: int) -> list[np.ndarray]:
    ids = st.sampled_from([0, 1, 2, MOST_IDS])
    texts = data.draw(st.lists(st.lists(st.tuples(*[ids] * size), max_size=20), max_size=6))
    return [np.array(text, np.int64).reshape(-1, size) for text in texts]


def counted(counter: NgramCounter, texts: Sequence[np.ndarray]) -> NgramCounter:
    """With the texts that it does not have yet."""
    for number, grams in enumerate(texts[counter.texts :], counter.texts):
        counter.add(number, grams)
    return counter


def assert_equal(counter: NgramCounter, other: NgramCounter) -> None:
    assert (counter.texts, counter.total) == (other.texts, other.total)
    for own, others in zip(counter.counts(), other.counts(), strict=True):
        np.testing.assert_array_equal(own, others)
    np.testing.assert_array_equal(counter.most_frequent(0.5), other.most_frequent(0.5))


@hypothesis.given(st.data(), SIZES, st.integers(1, 40))
def test_counts_are_exact_and_the_most_frequent_come_first(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, buffered: int
) -> None:
    texts = drawn_texts(data, size)
    counter = counted(NgramCounter(tmp_path_factory.mktemp("counts"), Window.of(size), buffered=buffered), texts)
    expected = Counter(tuple(gram) for text in texts for gram in text.tolist())
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


@hypothesis.given(st.data(), SIZES, st.integers(1, 40), st.lists(st.integers(0, 6), max_size=4))
def test_a_counter_goes_on_where_others_ended(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, buffered: int, ends: list[int]
) -> None:
    window, texts = Window.of(size), drawn_texts(data, size)
    once = counted(NgramCounter(tmp_path_factory.mktemp("once"), window, buffered=buffered), texts)
    folder = tmp_path_factory.mktemp("several")
    for end in sorted(ends):
        counted(NgramCounter(folder, window, buffered=buffered), texts[:end])
    several = NgramCounter(folder, window, buffered=buffered)
    for number in range(several.texts):
        several.add(number, texts[number])  # is counted already
    assert_equal(counted(several, texts), once)


def test_few_ngrams_are_in_memory_at_a_time(tmp_path: Path) -> None:
    counter = NgramCounter(tmp_path, Window.of(3), buffered=1000)
    rng = np.random.default_rng(0)
    for number in range(50):
        counter.add(number, rng.integers(0, 1000, (500, 3)))
        assert counter._size < 1000
    parts = [len(part) for part in counter.counts()]
    assert sum(parts) > 20_000 and max(parts) < 2 * sum(parts) / len(parts), "spread evenly over the parts"


@pytest.mark.parametrize("how", ["cut", "another byte", "gone", "unfinished"])
def test_what_is_not_whole_is_counted_again(how: str, tmp_path: Path) -> None:
    rng, window = np.random.default_rng(0), Window.of(3)
    texts = [rng.integers(0, 9, (30, 3)) for _ in range(6)]
    once = counted(NgramCounter(tmp_path / "once", window, buffered=1), texts)
    counted(NgramCounter(tmp_path / "several", window, buffered=1), texts)
    path = sorted((tmp_path / "several").iterdir())[3]
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "unfinished":
        path.with_name(f"{TEMPORARY}1-0").write_bytes(content)
    elif how != "gone":
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: -8 if how == "cut" else None])
    several = NgramCounter(tmp_path / "several", window, buffered=1)
    assert several.texts == 3 and len(list((tmp_path / "several").iterdir())) == 3
    assert_equal(counted(several, texts), once)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_other_shares_are_refused(share: float, tmp_path: Path) -> None:
    counter = NgramCounter(tmp_path, Window.of(2))
    counter.add(0, np.ones((3, 2), np.int64))
    with pytest.raises(InvalidInput, match="0 to 1"):
        counter.most_frequent(share)
    assert len(keys_of(np.ones((1, 2), np.int64))) == len(counter.most_frequent(0.1))
