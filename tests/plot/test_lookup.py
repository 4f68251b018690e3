"""Which entry a token gets: the domain's, the root's, or one with fewer neighbours."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jpets.errors import InvalidInput, InvalidTable
from jpets.plot.lookup import DOMAIN, ROOT, Lookup, levels_of
from jpets.plot.ngrams import Window, keys_of, ngrams, shortened
from jpets.plot.table import Table, TableInfo, TableWriter

WORDS = 6
Gram = tuple[int, ...]


def table_of(folder: Path, window: Window, grams: set[Gram]) -> Table:
    info = TableInfo("layers", window, 4)
    keys = keys_of(np.array(sorted(grams), np.int64).reshape(-1, window.size))
    writer = TableWriter(folder, info, keys)
    writer.append(np.zeros((len(keys), info.vectors, 4)))
    return Table(writer.finish(), info)


def alone(window: Window) -> set[Gram]:
    return {(0,) * window.before + (word + 1,) + (0,) * window.after for word in range(WORDS)}


@hypothesis.given(st.data(), st.sampled_from([(2, False), (3, False), (5, False), (3, True)]))
def test_the_first_of_the_levels_that_has_an_ngram_gives_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: tuple[int, bool]
) -> None:
    folder, window = tmp_path_factory.mktemp("tables"), Window.of(kind[0], causal=kind[1])
    texts = data.draw(st.lists(st.lists(st.integers(0, WORDS - 1), max_size=6), max_size=3))
    ids = np.array([id for text in texts for id in text], np.int32)
    grams = ngrams(ids, np.repeat(np.arange(len(texts)), [len(text) for text in texts]), window)
    spans = [(window.before, window.after), *window.shorter]
    levels = [[tuple(row) for row in shortened(grams, window, *span).tolist()] for span in spans]
    known = sorted({gram for level in levels for gram in level})
    some = st.sets(st.sampled_from(known)) if known else st.just(set[Gram]())
    in_domain, in_root = data.draw(some), data.draw(some) | alone(window)
    with_domain = data.draw(st.booleans())
    root, domain = table_of(folder, window, in_root), table_of(folder, window, in_domain)
    lookup = Lookup(root, WORDS)
    found = (lookup.of_domain(domain) if with_domain else lookup).find(grams)
    for token in range(len(ids)):
        if with_domain and levels[0][token] in in_domain:
            expected = (DOMAIN, sorted(in_domain).index(levels[0][token]), 0)
        else:
            depth, own = next((d, level[token]) for d, level in enumerate(levels, 1) if level[token] in in_root)
            expected = (ROOT, sorted(in_root).index(own), depth)
        assert (found.table[token], found.row[token], found.level[token]) == expected
    trained = levels_of(grams, root.keys, window, domain.keys if with_domain else None)
    np.testing.assert_array_equal(trained + 1, found.level, err_msg="layers train on what is looked up")


def test_a_root_without_one_of_the_tokens_is_refused(tmp_path: Path) -> None:
    window = Window.of(3)
    root = table_of(tmp_path, window, alone(window) - {(0, 3, 0)})
    with pytest.raises(InvalidTable, match="1 missing"):
        Lookup(root, WORDS)
    with pytest.raises(InvalidTable, match="2 missing"):
        Lookup(root, WORDS + 1)


def test_normal_forms_are_looked_up_instead_of_tokens(tmp_path: Path) -> None:
    """Here each odd word's form is the even one before it; a root needs no other words."""
    window = Window.of(3)
    forms = np.array([0, 1, 1, 3, 3, 5, 5])
    root = table_of(tmp_path, window, {(0, word, 0) for word in (1, 3, 5)} | {(1, 3, 5)})
    own = Lookup(root, WORDS, forms)
    grams = ngrams(np.array([1, 3, 5, 4]), None, window)
    found = own.find(grams)
    assert found.level.tolist() == [3, 1, 3, 2]
    np.testing.assert_array_equal(found.row, Lookup(root, WORDS, forms).find(forms[grams]).row)
    with pytest.raises(InvalidTable, match="each of 3 tokens alone, found 1 missing"):
        Lookup(table_of(tmp_path, window, {(0, 1, 0), (0, 3, 0), (0, 6, 0)}), WORDS, forms)
    with pytest.raises(InvalidInput, match="token ids"):
        own.find(np.array([[0, 1, WORDS + 1]]))


def test_tables_and_tokens_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    root = table_of(tmp_path, Window.of(3), alone(Window.of(3)))
    with pytest.raises(InvalidTable, match="window"):
        Lookup(root, WORDS).of_domain(table_of(tmp_path, Window.of(2), alone(Window.of(2))))
    for wrong in ([1, 0, 1], [0, WORDS + 1, 0]):
        with pytest.raises(InvalidInput, match="token ids"):
            Lookup(root, WORDS).find(np.array([wrong]))
