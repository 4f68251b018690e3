"""The contents of a body are counted without parsing, with the same result for any cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.errors import InvalidInput, TooLarge, Unparseable
from serving.http import body_bounds
from serving.http.body_bounds import Bounds, check_bounds

BOUNDS = Bounds(values=8, names=6, containers=5, depth=3)
documents = st.recursive(
    st.text('ab"\\{}[],:0é') | st.integers(-(10**70), 10**70) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,:['), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def small_bodies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_bounds, "FEW", 0)


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inside), default=0) if isinstance(value, (dict, list)) else 0


def count(value: Any) -> tuple[int, int, int, int]:
    """Commas, colons, containers, and the digits of the longest number."""
    if not isinstance(value, (dict, list)):
        digits = len(str(abs(value))) if isinstance(value, int) and not isinstance(value, bool) else 0
        return 0, 0, 0, digits
    inside = [count(each) for each in (value.values() if isinstance(value, dict) else value)]
    commas, colons, containers, numbers = zip(*inside, strict=True) if inside else ((0,),) * 4
    own = max(0, len(value) - 1), len(value) if isinstance(value, dict) else 0
    return own[0] + sum(commas), own[1] + sum(colons), 1 + sum(containers), max(numbers)


@given(document=documents, piece=st.integers(2, 40), indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_counts_what_a_reader_would(document: Any, piece: int, indent: int | None, ascii_only: bool) -> None:
    commas, colons, containers, digits = count(document)
    fits = (
        commas <= BOUNDS.values
        and colons <= BOUNDS.names
        and containers <= BOUNDS.containers
        and depth(document) <= BOUNDS.depth
        and digits < body_bounds.MOST_DIGITS
    )
    body = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_bounds, "PIECE", piece)
        try:
            check_bounds(body, BOUNDS)
        except InvalidInput:
            assert not fits
        else:
            assert fits


@pytest.mark.parametrize(
    ("body", "error", "part"),
    [
        (b"[" * 4, Unparseable, "deeper than 3 levels"),
        (b'{"a":{"a":{"a":{', Unparseable, "deeper than 3 levels"),
        (b"[]]", Unparseable, "closes more"),
        (b"[" + b"1," * 9, TooLarge, "8 values"),
        (b"[" + b"[]," * 6, TooLarge, "5 lists and objects"),
        (b"{" + b'"":0' * 7, TooLarge, "6 names"),
        (b"9" * 64, Unparseable, "64 digits"),
        (b"0." + b"1" * 64, Unparseable, "64 digits"),
        (b"1e" + b"1" * 64, Unparseable, "64 digits"),
    ],
)
def test_too_much_is_named(body: bytes, error: type[InvalidInput], part: str) -> None:
    with pytest.raises(error, match=part):
        check_bounds(body, BOUNDS)


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"[{,:" * 20 + b'"',
        b'"' + b"9" * 500 + b'"',
        b'"\\\\\\"[[[[[[',
        b'["\\\\", "[[[["]',
        b"9" * 63,
        b"",
        b"[[[]]]",
    ],
)
def test_what_stands_in_texts_counts_for_nothing(body: bytes) -> None:
    check_bounds(body, BOUNDS)
