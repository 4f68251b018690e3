"""Which n-grams a table holds, and which layers are trained to find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jpets.plot.choice import choose, left_out
from jpets.plot.lookup import among
from jpets.plot.ngrams import Window, keys_of, ngrams

WINDOW = Window.of(3)


def texts_of(rng: np.random.Generator, count: int, words: int) -> list[np.ndarray]:
    """Texts of twenty tokens with the frequencies of Zipf's law."""
    weights = 1 / np.arange(1, words + 1)
    return [rng.choice(words, 20, p=weights / weights.sum()) for _ in range(count)]


def found_of(texts: list[np.ndarray], keys: np.ndarray) -> float:
    return float(np.concatenate([among(keys_of(ngrams(ids, None, WINDOW)), keys) for ids in texts]).mean())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_training_finds_as_much_as_new_texts_will(tmp_path: Path, share: float) -> None:
    rng = np.random.default_rng(0)
    texts, others = texts_of(rng, 2000, 100), texts_of(rng, 500, 100)
    chosen = choose(texts, texts, WINDOW, share, tmp_path)
    served, trained = found_of(others, chosen.table), found_of(texts, chosen.training)
    assert found_of(texts, chosen.table) == pytest.approx(share, abs=0.01)
    assert served < 0.9 * share
    assert trained == pytest.approx(served, abs=0.03)
    assert not list(tmp_path.iterdir())


def test_texts_cut_for_training_find_as_much_of_what_is_left(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    heads, tails = texts_of(rng, 2000, 300), texts_of(rng, 2000, 10)
    whole = [np.concatenate(both) for both in zip(heads, tails, strict=True)]
    chosen = choose(whole, heads, WINDOW, 0.8, tmp_path)
    served, trained = found_of(texts_of(rng, 500, 300), chosen.table), found_of(heads, chosen.training)
    assert trained == pytest.approx(served, abs=0.03)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_texts_to_leave_some_out_find_what_the_table_holds(tmp_path: Path, count: int, share: float) -> None:
    texts = texts_of(np.random.default_rng(2), count, 50)
    chosen = choose(texts, texts, WINDOW, share, tmp_path)
    np.testing.assert_array_equal(chosen.table, chosen.training)
    assert bool(len(chosen.table)) == (count > 0 and share > 0)


@pytest.mark.parametrize("count", [10, 99, 100, 101, 5000])
def test_a_tenth_is_left_out_in_runs_of_neighbours(count: int) -> None:
    out = left_out(count)
    assert out.mean() == pytest.approx(0.1, abs=0.03)
    assert np.count_nonzero(np.diff(out.astype(int)) == 1) == min(10, count // 10)
