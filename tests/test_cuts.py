"""Long texts are tokenised in part: what is kept of them must be what is kept of the whole."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import tiny
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from jpets import truncation
from jpets.cuts import Cuts
from jpets.errors import InputTooLong
from jpets.tokenizing import TextEncoder
from jpets.truncation import Cutter, longest_first
from jpets.types import Preprocessing, Query

LIMIT = 16


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """Tokenizers of the supported families: words, bytes with and without a space before the first word, pieces of
    words."""
    if kind == "metaspace":
        letters = [(letter, -4.0) for letter in "\u2581abcdeéß中文!.[]<>SEPmask"]
        pieces = [
            ("<s>", 0.0),
            ("<pad>", 0.0),
            ("</s>", 0.0),
            ("<unk>", 0.0),
            *letters,
            ("\u2581a", -3.0),
            ("ab", -2.0),
        ]
        found = Tokenizer(models.Unigram(pieces, unk_id=3))
        found.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(_spaces(), " ")])
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        found.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
        found.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
        )
        return found
    found = Tokenizer.from_str(tiny("tiny-bert" if kind == "words" else "tiny-roberta").tokenizer_json)
    if kind == "bytes without a space":
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.no_padding()
    found.no_truncation()
    return found


def _spaces() -> Regex:
    return Regex(" {2,}")


KINDS = ("words", "bytes", "bytes without a space", "metaspace")
LETTERS = ("a", "ab", "Cé", "e\u0301", "ß", "中", "文", "!", ".", "[", "]", "'s", "3", "Σ", "ﬁ", "x" * 120)
SPACES = (" ", "  ", "\n", "\t", "\x01", "\u00a0", "\u0600", "\u200d")
SPECIAL = ("[SEP]", "[MASK]", "<s>", "</s>", "<pad>", "<mask>", "##")
pieces = st.sampled_from([*LETTERS, *SPACES, *SPECIAL])
texts = st.lists(pieces, min_size=1, max_size=120).map("".join).filter(str.strip)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are short ones here."""
    monkeypatch.setattr(truncation, "SHORT", 8)
    monkeypatch.setattr(truncation, "LETTERS", 1)
    monkeypatch.setattr(truncation, "PIECE", 5)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, at=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_parts_have_the_tokens_of_the_whole(kind: str, text: str, at: int) -> None:
    own = tokenizer(kind)
    cuts = Cuts(json.loads(own.to_str()))
    for place in (cuts.before(text, at), cuts.after(text, at)):
        parts = [own.encode(part, add_special_tokens=False).ids for part in (text[:place], text[place:])]
        assert [id for part in parts for id in part] == own.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, pair=st.none() | texts)
@example(text="a " * 40, pair="a " * 50)
@example(text="a " * 50, pair="a " * 40)
@example(text="中" * 90, pair="!" * 80)
@example(text="x" * 500, pair=None)
@settings(max_examples=40, deadline=None)
def test_what_is_kept_is_what_the_library_keeps(kind: str, side: str, text: str, pair: str | None) -> None:
    own = Tokenizer.from_str(tokenizer(kind).to_str())
    own.enable_truncation(LIMIT, strategy="longest_first", direction=side)
    encoder = TextEncoder(own.to_str(), own.get_vocab_size(), 2, LIMIT)
    expected = own.encode(text, pair) if pair is not None else own.encode(text)
    found = encoder.encode(Query(None, text, pair, truncate=True), Preprocessing(), spelled=True)
    assert found.ids.tolist() == expected.ids
    assert found.types.tolist() == expected.type_ids
    assert found.spelling is not None
    assert found.spelling.of_text.tolist() == [-1 if each is None else each for each in expected.sequence_ids]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(4, 30))
@settings(max_examples=200, deadline=None)
def test_pairs_are_cut_as_the_library_cuts_them(first: int, second: int, limit: int) -> None:
    own = tokenizer("words")
    a, b = (own.encode(word * count, add_special_tokens=False) for word, count in (("a ", first), ("b ", second)))
    own = Tokenizer.from_str(own.to_str())
    own.enable_truncation(limit, strategy="longest_first")
    kept = [each for each in own.post_process(a, b, True).sequence_ids if each is not None]
    assert (kept.count(0), kept.count(1)) == longest_first(first, second, limit - 3)


@pytest.mark.parametrize("text", ["word " * 30_000, "中" * 150_000, "!" * 150_000, "." + " !" * 75_000])
def test_no_more_is_tokenised_than_is_needed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder(tiny().tokenizer_json, 800, 2, LIMIT)
    read: list[int] = []
    tokenize = Cutter.tokenize

    def noted(self: Cutter, part: str) -> Any:
        read.append(len(part))
        return tokenize(self, part)

    monkeypatch.setattr(Cutter, "tokenize", noted)
    assert len(encoder.encode(Query(None, text, truncate=True), Preprocessing()).ids) == LIMIT
    with pytest.raises(InputTooLong, match=f"more than {LIMIT} tokens"):
        encoder.encode(Query(None, text), Preprocessing())
    assert sum(read) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": [{"content": "a b", "normalized": False, "rstrip": False, "single_word": False}]},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "-"}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"pre_tokenizer": None},
    ],
)
def test_an_unknown_tokenizer_cuts_nowhere(change: dict[str, object]) -> None:
    document = json.loads(tiny().tokenizer_json)
    assert Cuts(document).before("one two three", 9) == 7
    cuts = Cuts({**document, **change})
    assert (cuts.before("one two three", 9), cuts.after("one two three", 4)) == (0, 13)


def test_offsets_of_a_cut_text_are_those_of_the_whole() -> None:
    document = json.loads(tiny().tokenizer_json)
    context = " ".join(f"word{number}" for number in range(200))
    for side in ("Left", "Right"):
        document["truncation"] = {"direction": side, "max_length": 512, "strategy": "LongestFirst", "stride": 0}
        encoder = TextEncoder(json.dumps(document), 800, 2, LIMIT)
        query = Query(None, "which?", context, truncate=True)
        passage = encoder.encode(query, Preprocessing(), passage=True).passage
        assert passage is not None and passage.offsets is not None
        answer = passage.answer(passage.start, passage.end)
        assert answer is not None and context[answer.start : answer.end] == answer.text
        assert (answer.end == len(context)) if side == "Left" else (answer.start == 0)
        assert np.all(np.diff(passage.offsets[:, 0]) >= 0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("text", ["w" * 2000, "\u0301" * 2000, "w" * 990 + " " + "w" * 1009])
def test_more_than_is_read_at_once_is_refused(text: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read of it: what a tokenizer takes for a text is a hundred times its size."""
    monkeypatch.setattr(truncation, "MOST_WHOLE", 1000)
    monkeypatch.setattr(truncation, "SHORT", 64)
    backbone = tiny()
    document = json.loads(backbone.tokenizer_json)
    document["truncation"] = {"direction": side.title(), "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    encoder = TextEncoder(json.dumps(document), backbone.config.vocab_size, 2, 16)
    for query in (Query(None, text, truncate=True), Query(None, "short", text, truncate=True)):
        with pytest.raises(InputTooLong, match="no place to cut it"):
            encoder.encode(query, Preprocessing())
    assert len(encoder.encode(Query(None, text[:900], truncate=True), Preprocessing()).ids) <= 16
    spaced = " ".join(["word"] * 2000)
    assert len(encoder.encode(Query(None, spaced, truncate=True), Preprocessing()).ids) == 16
