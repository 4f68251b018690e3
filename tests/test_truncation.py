"""Pairs are cut by a task's strategy as ``transformers``' own tokenizers cut them."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from jpets import truncation
from jpets.errors import InputTooLong
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query, Side, TruncationStrategy

LONGEST = 24
WORDS = ("the", "library", "reads", "naïve", "中文的词", "🙂", "👩\u200d🚀", "a-b", "\u200b", "\r\n", "", "[SEP]")
texts = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few words are tokenised in part already."""
    monkeypatch.setattr(truncation, "SHORT", 8)
    monkeypatch.setattr(truncation, "LETTERS", 1)


def encoder_of(name: str, side: Side) -> TextEncoder:
    backbone = tiny(name)
    document = json.loads(backbone.tokenizer_json)
    document["truncation"] = {"direction": side.title(), "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    config = backbone.config
    return TextEncoder(json.dumps(document), config.vocab_size, config.type_vocab_size, LONGEST)


def kept_by_the_library(
    encoder: TextEncoder, query: Query, strategy: TruncationStrategy, limit: int, side: Side
) -> list[int] | None:
    """Token ids; None for texts that it refuses."""
    tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, truncation_side=side)
    batch = [[own] for own in (query.text, query.text_pair) if own is not None]  # in which an empty text is one
    try:
        (ids,) = reference(*batch, truncation=strategy, max_length=limit)["input_ids"]
    except Exception as error:  # noqa: BLE001 (the tokenizers library raises no other)
        assert "Truncation error" in str(error)
        return None
    return list(ids)


@pytest.mark.parametrize("strategy", get_args(TruncationStrategy))
@pytest.mark.parametrize("side", get_args(Side))
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-roberta"])
@settings(max_examples=50, deadline=None)
@given(text=texts.filter(str.strip), pair=st.none() | texts, limit=st.integers(5, LONGEST))
def test_texts_are_cut_as_the_library_cuts_them(
    name: str, side: Side, strategy: TruncationStrategy, text: str, pair: str | None, limit: int
) -> None:
    encoder, query = encoder_of(name, side), Query(None, text, pair)
    rule = Preprocessing(limit, True, truncation_strategy=strategy)
    expected = kept_by_the_library(encoder, query, strategy, limit, side)
    if expected is None:
        with pytest.raises(InputTooLong, match=strategy):
            encoder.encode(query, rule)
    else:
        assert encoder.encode(query, rule).ids.tolist() == expected


@pytest.mark.parametrize("side", get_args(Side))
@settings(max_examples=50, deadline=None)
@given(text=texts.filter(str.strip), pair=st.none() | texts)
def test_a_query_names_the_side_on_which_it_is_cut(side: Side, text: str, pair: str | None) -> None:
    """Whatever the tokenizer's own side, and the task's rule."""
    for own in get_args(Side):
        encoder = encoder_of("tiny-bert", own)
        found = encoder.encode(Query(None, text, pair, truncate=side), Preprocessing())
        expected = kept_by_the_library(encoder, Query(None, text, pair), "longest_first", LONGEST, side)
        assert found.ids.tolist() == expected


@pytest.mark.parametrize(
    ("strategy", "text", "pair", "named"),
    [
        ("only_first", "a", "the library " * 30, "no room for a token of the first one"),
        ("only_second", "the library " * 30, "a", "no room for a token of the second one"),
        ("only_second", "the library " * 30, "", "no room for a token of the second one"),
        ("only_second", "the library " * 30, None, "only a pair's second one is cut"),
    ],
)
def test_what_cannot_lose_enough_is_refused_by_name(
    strategy: TruncationStrategy, text: str, pair: str | None, named: str
) -> None:
    rule = Preprocessing(truncation=True, truncation_strategy=strategy)
    with pytest.raises(InputTooLong, match=named):
        encoder_of("tiny-bert", "right").encode(Query(None, text, pair), rule)


def test_a_strategy_cuts_nothing_by_itself() -> None:
    rule = Preprocessing(truncation_strategy="only_second")
    with pytest.raises(InputTooLong, match="ask for truncation"):
        encoder_of("tiny-bert", "right").encode(Query(None, "a", "the library " * 30), rule)


def test_windows_are_cut_by_no_strategy() -> None:
    encoder, query = encoder_of("tiny-bert", "right"), Query(None, "which library?", "the library reads " * 30)
    expected = encoder.windows(query, Preprocessing(), LONGEST, 4, passage=True)
    rule = Preprocessing(truncation=True, truncation_strategy="only_first")
    found = encoder.windows(query, rule, LONGEST, 4, passage=True)
    assert len(found) > 1
    assert [own.ids.tolist() for own in found] == [own.ids.tolist() for own in expected]
