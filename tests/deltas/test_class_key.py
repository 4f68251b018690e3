"""The names of delta classes, under which costs and metrics are kept."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.deltas.protocol import ClassKey

NAMES = st.text("ab:=+/#% 0-", min_size=1, max_size=4)
KEYS = st.builds(
    ClassKey,
    NAMES,
    st.lists(st.tuples(NAMES, st.integers(0, 20)), max_size=3).map(tuple),
    st.lists(st.integers(0, 30), unique=True, max_size=5).map(sorted).map(tuple),
    st.lists(st.tuples(NAMES, NAMES), max_size=3).map(tuple),
    st.integers(0, 2),
)
KEY = ClassKey("adapter", (("attn_out", 64), ("ffn_out", 64)), (0, 1, 2, 5), (("activation", "gelu"),))


@given(KEYS, KEYS)
def test_two_classes_never_have_the_same_name(one: ClassKey, other: ClassKey) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": (0, 1, 2)},
        {"layers": (0, 1, 2, 4)},
        {"ordinal": 1},
        {"options": (("activation", "relu"),)},
        {"options": (("gate", "gelu"),)},
        {"sites": (("attn_out", 64), ("ffn_out", 32))},
    ],
)
def test_every_field_is_in_the_name(change: dict[str, object]) -> None:
    assert str(dataclasses.replace(KEY, **change)) != str(KEY)  # type: ignore[arg-type]


def test_the_name_reads_well() -> None:
    assert str(KEY) == "adapter/attn_out:64+ffn_out:64/activation=gelu/layers 0-2+5"
    assert str(ClassKey("bitfit", ordinal=1)) == "bitfit#1"
