"""Which n-grams a table holds, and which layers are trained to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jpets.files import write_atomic
from jpets.plot import sealed
from jpets.plot.choice import CHOSEN, Chosen, choose, left_out
from jpets.plot.lookup import among
from jpets.plot.ngrams import Window, keys_of, ngrams

WINDOW = Window.of(3)
Texts = Sequence[np.ndarray]


def texts_of(rng: np.random.Generator, count: int, words: int) -> list[np.ndarray]:
    """Texts of twenty tokens with the frequencies of Zipf's law."""
    weights = 1 / np.arange(1, words + 1)
    return [rng.choice(words, 20, p=weights / weights.sum()) for _ in range(count)]


def from_number(texts: Texts) -> Callable[[int], Texts]:
    return lambda start: texts[start:]


def found_of(texts: Texts, keys: np.ndarray) -> float:
    return float(np.concatenate([among(keys_of(ngrams(ids, None, WINDOW)), keys) for ids in texts]).mean())


def assert_equal(chosen: Chosen, other: Chosen) -> None:
    for own, others in zip(chosen, other, strict=True):
        assert own.dtype == others.dtype
        np.testing.assert_array_equal(own, others)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_training_finds_as_much_as_new_texts_will(tmp_path: Path, share: float) -> None:
    rng = np.random.default_rng(0)
    texts, others = texts_of(rng, 2000, 100), texts_of(rng, 500, 100)
    chosen = choose(from_number(texts), texts, WINDOW, share, tmp_path)
    served, trained = found_of(others, chosen.table), found_of(texts, chosen.training)
    assert found_of(texts, chosen.table) == pytest.approx(share, abs=0.01)
    assert served < 0.9 * share
    assert trained == pytest.approx(served, abs=0.03)
    assert [path.name for path in tmp_path.iterdir()] == [CHOSEN], "counts take no space any more"


def test_texts_cut_for_training_find_as_much_of_what_is_left(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    heads, tails = texts_of(rng, 2000, 300), texts_of(rng, 2000, 10)
    whole = [np.concatenate(both) for both in zip(heads, tails, strict=True)]
    chosen = choose(from_number(whole), heads, WINDOW, 0.8, tmp_path)
    served, trained = found_of(texts_of(rng, 500, 300), chosen.table), found_of(heads, chosen.training)
    assert trained == pytest.approx(served, abs=0.03)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_texts_to_leave_some_out_find_what_the_table_holds(tmp_path: Path, count: int, share: float) -> None:
    texts = texts_of(np.random.default_rng(2), count, 50)
    chosen = choose(from_number(texts), texts, WINDOW, share, tmp_path)
    np.testing.assert_array_equal(chosen.table, chosen.training)
    assert bool(len(chosen.table)) == (count > 0 and share > 0)
    assert_equal(choose(from_number(texts), texts, WINDOW, share, tmp_path), chosen)


@pytest.mark.parametrize("count", [10, 99, 100, 101, 5000])
def test_a_tenth_is_left_out_in_runs_of_neighbours(count: int) -> None:
    out = left_out(count)
    assert out.mean() == pytest.approx(0.1, abs=0.03)
    assert np.count_nonzero(np.diff(out.astype(int)) == 1) == min(10, count // 10)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("buffered", [1, 70, 1 << 20])
def test_a_choice_that_was_interrupted_at_any_text_goes_on(tmp_path: Path, size: int, buffered: int) -> None:
    texts, window = texts_of(np.random.default_rng(3), 32, 30), Window.of(size)
    whole = choose(from_number(texts), texts, window, 0.5, tmp_path / "whole")
    begun: list[int] = []

    def until(last: int) -> Callable[[int], Iterator[np.ndarray]]:
        def each(start: int) -> Iterator[np.ndarray]:
            begun.append(start)
            for number, ids in enumerate(texts[start:], start):
                if number == last:
                    raise KeyboardInterrupt
                yield ids

        return each

    for last in range(len(texts)):
        with pytest.raises(KeyboardInterrupt):
            choose(until(last), texts, window, 0.5, tmp_path / "parts", buffered=buffered)
    assert_equal(choose(until(len(texts)), texts, window, 0.5, tmp_path / "parts", buffered=buffered), whole)
    assert begun == sorted(begun) and len(begun) == len(texts) + 1
    behind = {1: 30, 70: 20, 1 << 20: 0}[buffered]
    assert begun[-1] >= behind, "what was written is not counted again"
    assert_equal(choose(until(0), texts, window, 0.5, tmp_path / "parts", buffered=buffered), whole)
    assert len(begun) == len(texts) + 1, "no text is read for what is chosen already"


@pytest.mark.parametrize("behind", [False, True])
def test_a_choice_that_was_interrupted_at_any_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    texts = texts_of(np.random.default_rng(4), 32, 30)
    whole = choose(from_number(texts), texts, WINDOW, 0.5, tmp_path / "whole")
    written: list[Path] = []

    def write(path: Path, data: bytes) -> None:
        if written:
            raise KeyboardInterrupt
        write_atomic(path, data)
        written.append(path)
        if behind:
            raise KeyboardInterrupt

    monkeypatch.setattr(sealed, "write_atomic", write)
    chosen, ends = None, 0
    while chosen is None:
        written.clear()
        try:
            chosen = choose(from_number(texts), texts, WINDOW, 0.5, tmp_path / "parts", buffered=70)
        except KeyboardInterrupt:
            ends += 1
    assert ends > 20, "one at each write"
    assert_equal(chosen, whole)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [CHOSEN]


def test_a_damaged_choice_is_made_again(tmp_path: Path) -> None:
    texts = texts_of(np.random.default_rng(5), 32, 30)
    whole = choose(from_number(texts), texts, WINDOW, 0.5, tmp_path)
    path = tmp_path / CHOSEN
    path.write_bytes(path.read_bytes()[:-8])
    assert_equal(choose(from_number(texts), texts, WINDOW, 0.5, tmp_path), whole)
