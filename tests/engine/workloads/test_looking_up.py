"""The texts of a batch in tables, all at once, beside each alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from domain_tables import IDS, ROOT, WORDS, alone, grams, make_folder, written

from jpets.deltas.protocol import NO_LEAD, Lead
from jpets.engine.batch.rows import Row
from jpets.engine.workloads.looking_up import looked_up
from jpets.engine.workloads.workload import RowFailures
from jpets.errors import EngineFailure, JpetsError
from jpets.plot.domains import DomainTables
from jpets.plot.tree import Branch, Tree
from jpets.tokenizing import NO_ROW
from jpets.types import OpenTables

MORE = np.array([3, 4, 5, 3, 4, 6], np.int32)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> DomainTables:
    """Of two domains."""
    folder = make_folder(tmp_path_factory.mktemp("tables"))
    science = Branch(written(folder, ROOT, np.concatenate([grams(MORE), alone()]), 3), ROOT)
    Tree.change(folder, lambda tree: tree.having("science", science))
    return DomainTables(folder, WORDS)


def row_of(ids: Sequence[int], tables: OpenTables, virtual: int = 0) -> Row:
    own = np.array([NO_ROW] * virtual + list(ids), np.int32)
    lead = Lead(virtual) if virtual else NO_LEAD
    return dataclasses.replace(Row.of_tokens(own, np.zeros_like(own), {}, 0), lead=lead, tables=tables)


TEXTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([*IDS.tolist(), *MORE.tolist(), 20]), min_size=1, max_size=6),
        st.sampled_from([None, "games", "science"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


@hypothesis.given(texts=TEXTS)
def test_a_batch_is_looked_up_as_each_of_its_texts_alone(
    tables: DomainTables, texts: Sequence[tuple[list[int], str | None, int]]
) -> None:
    """Whatever stands beside it; virtual tokens have no row."""
    found = looked_up([row_of(ids, tables.opened(domain), virtual) for ids, domain, virtual in texts])
    expected = [
        np.array([NO_ROW] * virtual + tables.opened(domain).rows(np.array(ids, np.int32)).tolist())
        for ids, domain, virtual in texts
    ]
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.concatenate(expected))


class Counted:
    """Tables that cannot find token 9."""

    name = "counted"

    def __init__(self) -> None:
        self.calls = 0

    def rows(self, ids: np.ndarray, text_of_token: np.ndarray | None = None) -> np.ndarray:
        self.calls += 1
        if (ids == 9).any():
            raise EngineFailure("block 9 is damaged")
        return ids + 100

    def found(self, ids: np.ndarray, text_of_token: np.ndarray | None = None) -> tuple[np.ndarray, Callable[[], None]]:
        return self.rows(ids, text_of_token), lambda: None


def test_a_batch_is_one_look_up_in_each_table() -> None:
    one, other = Counted(), Counted()
    found = looked_up([row_of([at, at + 1], other if at % 3 else one) for at in range(10, 40)])
    np.testing.assert_array_equal(found, [at + more + 100 for at in range(10, 40) for more in (0, 1)])
    assert one.calls == other.calls == 1


def test_a_text_that_cannot_be_looked_up_is_told_apart() -> None:
    rows = [row_of(ids, Counted()) for ids in ([1], [2])]
    bad = Counted()
    rows[1:1] = [row_of(ids, bad) for ids in ([3], [4, 9], [5], [9])]
    with pytest.raises(RowFailures) as told:
        looked_up(rows)
    assert sorted(told.value.errors) == [2, 4]
    assert all(isinstance(error, JpetsError) and "block 9" in error.message for error in told.value.errors.values())
    assert len(looked_up([row for at, row in enumerate(rows) if at not in told.value.errors])) == 4


def test_tokens_count_once_however_often_they_are_looked_up(tables: DomainTables) -> None:
    """A batch is looked up again without a text that cannot be."""

    def counted() -> dict[str, int]:
        return {each.name: sum(each.levels.values()) for each in tables.report()}

    before = counted()
    texts = ([3, 4, 5], "science"), ([7, 8], "games"), ([7, WORDS], "games"), ([20], "games")
    rows = [row_of(ids, tables.opened(domain)) for ids, domain in texts]
    with pytest.raises(RowFailures) as told:
        looked_up(rows)
    assert [*told.value.errors] == [2] and counted() == before
    del rows[2]
    looked_up(rows)
    assert {name: count - before[name] for name, count in counted().items()} == {"": 0, "games": 3, "science": 3}


def test_what_fails_only_together_is_looked_up_text_by_text() -> None:
    class Once(Counted):
        def rows(self, ids: np.ndarray, text_of_token: np.ndarray | None = None) -> np.ndarray:
            if text_of_token is not None:
                raise EngineFailure("a table was written to")
            return super().rows(ids)

    tables = Once()
    np.testing.assert_array_equal(looked_up([row_of([1, 2], tables), row_of([3], tables, 1)]), [101, 102, -1, 103])
