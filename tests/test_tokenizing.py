"""Texts to ids by tokenizers that are not BERT's."""

from __future__ import annotations

import pytest
import tokenizers
from support import tiny
from tokenizers import models, normalizers, pre_tokenizers, processors

from jpets.errors import InputTooLong, InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query, TruncationStrategy


def sentencepiece() -> tokenizers.Tokenizer:
    """As XLM-RoBERTa's: a unigram model behind a metaspace, ``<pad>`` at 1."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), ("\u2581one", -3.0)]
    pieces += [(letter, -6.0) for letter in "enotw"]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B:1 </s>:1", [("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["unigram", "bytes"])
def test_pairs_of_models_with_one_token_type(kind: str) -> None:
    tokenizer = sentencepiece()
    if kind == "bytes":
        tokenizer = tokenizers.Tokenizer.from_str(tiny("tiny-roberta").tokenizer_json)
    encoder = TextEncoder(tokenizer.to_str(), tokenizer.get_vocab_size(), 1, 32)
    assert encoder.pad_id == 1
    found = encoder.encode(Query(None, "one two\u2026", text_pair="two"), Preprocessing())
    expected = tokenizer.encode("one two\u2026", "two")
    assert found.ids.tolist() == expected.ids
    assert not found.types.any()
    assert encoder.encode(Query(None, "one " * 40, truncate=True), Preprocessing()).ids.tolist()[-1] == 2


def test_texts_are_cut_to_the_usual_length_but_may_be_longer() -> None:
    """As ``model_max_length`` has it: it cuts where nothing else says how far, and forbids nothing."""
    encoder = TextEncoder(tiny().tokenizer_json, 800, 2, 32, usual_length=8)
    text = "a chess engine " * 6

    def length(rule: Preprocessing, truncate: bool | None) -> int:
        return len(encoder.encode(Query(None, text, truncate=truncate), rule).ids)

    whole = length(Preprocessing(), None)
    assert 8 < whole <= 32
    assert length(Preprocessing(), True) == length(Preprocessing(truncation=True), None) == 8
    assert length(Preprocessing(max_length=12), True) == 12
    with pytest.raises(InputTooLong, match="the limit is 12"):
        length(Preprocessing(max_length=12), None)


def test_a_query_says_how_long_it_may_be_and_which_of_its_texts_is_cut() -> None:
    encoder = TextEncoder(tiny().tokenizer_json, 800, 2, 32, usual_length=20)
    text, other = "a chess engine " * 6, "the library for a file"
    for limit, rule in ((12, Preprocessing()), (12, Preprocessing(max_length=16)), (16, Preprocessing(max_length=8))):
        found = encoder.encode(Query(None, text, other, truncate=True, max_length=limit), rule)
        assert len(found.ids) == min(limit, rule.max_length or limit)
    assert len(encoder.encode(Query(None, text, truncate=True, max_length=30), Preprocessing()).ids) > 20
    first, second = text, "the library for a file " * 3  # each has more than half of the tokens
    strategies: tuple[TruncationStrategy, ...] = ("only_first", "longest_first")
    for strategy in strategies:
        expected = tokenizers.Tokenizer.from_str(tiny().tokenizer_json)
        expected.enable_truncation(24, strategy=strategy)
        query = Query(None, first, second, truncate=True, max_length=24, truncation_strategy=strategy)
        rule = Preprocessing(truncation_strategy="only_second")
        assert encoder.encode(query, rule).ids.tolist() == expected.encode(first, second).ids
    for wrong in (Query(None, text, max_length=4), Query(None, input_ids=[2, 9, 9, 9, 3], max_length=4)):
        with pytest.raises(InputTooLong, match="the limit is 4"):
            encoder.encode(wrong, Preprocessing())
    with pytest.raises(InvalidInput, match="max_length: expected a number of tokens from 1, found 0"):
        encoder.encode(Query(None, text, truncate=True, max_length=0), Preprocessing())


RULE = Preprocessing(prefix="query ", prompts={"passage": "passage ", "none": ""})


@pytest.mark.parametrize(("prompt", "before"), [(None, "query "), ("passage", "passage "), ("none", "")])
def test_a_query_names_what_stands_before_its_text(prompt: str | None, before: str) -> None:
    encoder = TextEncoder(tiny().tokenizer_json, 800, 2, 32)
    found = encoder.encode(Query(None, "a library", prompt=prompt), RULE, spelled=True)
    plain = encoder.encode(Query(None, f"{before}a library"), Preprocessing())
    assert found.ids.tolist() == plain.ids.tolist()
    assert found.spelling is not None
    assert (found.spelling.of_text == 0).sum() == len(encoder.encode(Query(None, "a library"), Preprocessing()).ids) - 2


@pytest.mark.parametrize(
    ("query", "rule", "named"),
    [
        (Query(None, "a", prompt="other"), RULE, r"prompt: expected one of \['none', 'passage'\], found 'other'"),
        (Query(None, "a", prompt="other"), Preprocessing(), "prompt: expected none, as there are no prompts"),
        (Query(None, input_ids=[2, 5, 3], prompt="passage"), RULE, "prompt: expected none beside token ids"),
    ],
)
def test_a_prompt_that_cannot_stand_there_is_refused(query: Query, rule: Preprocessing, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        TextEncoder(tiny().tokenizer_json, 800, 2, 32).encode(query, rule)


@pytest.mark.parametrize("windowed", [True, False])
def test_a_task_that_learnt_without_token_types_gets_none(*, windowed: bool) -> None:
    encoder, query = TextEncoder.of(tiny()), Query(None, "which game?", text_pair="a chess engine that plays " * 4)

    def types(rule: Preprocessing) -> set[int]:
        found = encoder.windows(query, rule, 24, 4) if windowed else [encoder.encode(query, rule)]
        return {int(number) for own in found for number in own.types}

    assert types(Preprocessing()) == {0, 1}
    assert types(Preprocessing(one_type=True)) == {0}
