"""Entities are those of ``transformers``' token classification pipeline: labels, words and characters exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from support import tiny
from transformers import PreTrainedTokenizerFast
from transformers.pipelines.token_classification import AggregationStrategy, TokenClassificationPipeline

from jpets.engine.results.entities import entities
from jpets.engine.results.numbers import softmax
from jpets.tokenizing import TextEncoder
from jpets.types import Aggregation, Entity, Preprocessing, Query

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
PIECES = (
    "Peter Miller", "peter", "sparse matrices", "the library", "naïve café", "e\u0301te\u0301", "🙂🙂",
    "שלום עולם", "مرحبا", "中文的词", "a\r\nb", "x\ty", "don't", "U.S.A.", "100%", "e-mail@host.org", "İstanbul",
    "ﬁne", "\U0001f468\u200d\U0001f469", "[SEP]", "\u00a0", "a  b", "µm", "ﷺ", "\u200b", "Straße", "x" * 40,
)  # fmt: skip


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(5)
    made = [" ".join(rng.choice(PIECES, rng.integers(1, 7)).tolist()) for _ in range(count)]
    return [text for text in made if text.strip()]


@pytest.fixture(scope="module", params=["tiny-bert", "tiny-roberta"])
def read(request: pytest.FixtureRequest) -> tuple[TextEncoder, TokenClassificationPipeline]:
    backbone = tiny(request.param)
    encoder = TextEncoder.of(backbone)
    unknown = "[UNK]" if request.param == "tiny-bert" else "<unk>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder.tokenizer, unk_token=unknown)
    pipeline = object.__new__(TokenClassificationPipeline)  # what needs no model of it
    pipeline.tokenizer = tokenizer
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(LABELS))))
    return encoder, pipeline


def of_pipeline(
    pipeline: TokenClassificationPipeline, text: str, longest: int, logits: np.ndarray, how: str
) -> list[dict[str, Any]]:
    found = pipeline.tokenizer(
        text, truncation=True, max_length=longest, return_offsets_mapping=True, return_special_tokens_mask=True
    )
    assert len(found["input_ids"]) == len(logits)
    strategy = AggregationStrategy(how)
    before = pipeline.gather_pre_entities(
        text, np.array(found["input_ids"]), softmax(logits), found["offset_mapping"],
        np.array(found["special_tokens_mask"]), strategy,
    )  # fmt: skip
    return [own for own in pipeline.aggregate(before, strategy) if own.get("entity_group", own.get("entity")) != "O"]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("how", get_args(Aggregation))
def test_entities_are_those_of_the_pipeline(
    read: tuple[TextEncoder, TokenClassificationPipeline], how: Aggregation
) -> None:
    encoder, pipeline = read
    rng = np.random.default_rng(7)
    compared = 0
    for text in texts(220):
        tokens = encoder.encode(Query(None, text, truncate=True), Preprocessing(), spelled=True)
        assert tokens.spelling is not None
        logits = rng.normal(0, 1, (len(tokens.ids), len(LABELS))).astype(np.float32)
        logits[:, rng.integers(0, len(LABELS))] += 1.5  # runs of one label, too
        found = entities(softmax(logits), LABELS, tokens.spelling, how)
        expected = of_pipeline(pipeline, text, encoder.longest, logits, how)
        assert [(own.label, own.start, own.end, own.word) for own in found] == [
            (own.get("entity_group", own.get("entity")), own["start"], own["end"], own["word"]) for own in expected
        ], text
        np.testing.assert_allclose([own.score for own in found], [own["score"] for own in expected], atol=1e-6)
        for own in found:
            assert own.text == text[own.start : own.end]
        compared += len(found)
    assert compared > 500


def entities_of(encoder: TextEncoder, query: Query, rule: Preprocessing) -> list[Entity]:
    """Of a model that finds a person in every token."""
    tokens = encoder.encode(query, rule, spelled=True)
    assert tokens.spelling is not None
    logits = np.zeros((len(tokens.ids), len(LABELS)), np.float32)
    logits[:, LABELS.index("I-PER")] = 9
    return list(entities(softmax(logits), LABELS, tokens.spelling, "average"))


@pytest.mark.parametrize(
    ("rule", "pair"),
    [
        (Preprocessing(prefix="which library: "), None),
        (Preprocessing(template="which {text} is it"), None),
        (Preprocessing(template="which {text_pair} is {text}"), "the library"),
        (Preprocessing(prefix="one of: "), "the library"),
        (Preprocessing(max_length=12, truncation=True), "the library " * 9),
    ],
)
def test_characters_are_those_of_the_text_that_was_sent(
    read: tuple[TextEncoder, TokenClassificationPipeline], rule: Preprocessing, pair: str | None
) -> None:
    encoder, _ = read
    text = "sparse matrices"
    found = entities_of(encoder, Query(None, text, pair), rule)
    assert {own.in_pair for own in found} == ({False, True} if pair is not None else {False})
    for own in found:
        whole = pair if own.in_pair else text
        assert whole is not None and own.text == whole[own.start : own.end]
    assert any(own.text == "sparse matrices" for own in found) or rule.truncation


def test_a_long_text_that_is_read_in_part_keeps_its_characters() -> None:
    encoder = TextEncoder.of(tiny("tiny-bert"))
    text = "the library reads files " * 2000
    for found in (entities_of(encoder, Query(None, text, truncate=True), Preprocessing()),):
        assert found[0].start == 0 and found[0].text == text[: found[0].end]
        assert found[0].text is not None and len(found[0].text) > 50
