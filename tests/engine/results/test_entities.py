"""Entities belong to the text: special tokens and virtual tokens belong to no entity."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from support import make_head, make_task, random_delta, shallow

from jpets.engine.engine import Engine
from jpets.engine.queue.response_cache import ResponseCache
from jpets.engine.results.entities import entities
from jpets.engine.results.numbers import softmax
from jpets.spelling import Spelling
from jpets.tokenizing import Tokens as Encoded
from jpets.training.predict import agreement, of_texts
from jpets.types import Head, Preprocessing, Query, Task, Timing, Tokens
from serving.protocols.oip.outputs import tensors_of

LABELS = ("O", "B-PER", "I-PER", "B-LOC")
TEXT, PAIR = "sparse matrices", "a chess engine"


def says(*labels: str) -> np.ndarray:
    """Logits [tokens, labels] of a model that is sure."""
    logits = np.zeros((len(labels), len(LABELS)), np.float32)
    logits[np.arange(len(labels)), [LABELS.index(each) for each in labels]] = 9
    return logits


@pytest.mark.parametrize(
    ("said", "of_text", "expected"),
    [
        (("B-LOC", "O", "B-PER", "I-PER"), (-1, 0, 0, -1), [("PER", 2, 3)]),
        (("I-PER", "I-PER", "I-PER", "I-PER"), (-1, 0, 0, -1), [("PER", 1, 3)]),
        (("B-LOC", "I-PER", "I-PER", "I-PER", "B-LOC"), (-1, 0, -1, 1, -1), [("PER", 1, 2), ("PER", 3, 4)]),
        (("I-PER", "I-PER", "I-PER"), (0, 0, 1), [("PER", 0, 2), ("PER", 2, 3)]),
        (("B-LOC", "B-LOC"), (-1, -1), []),
    ],
)
def test_only_tokens_of_texts_are_of_entities(
    said: tuple[str, ...], of_text: tuple[int, ...], expected: list[tuple[str, int, int]]
) -> None:
    found = entities(softmax(says(*said)), LABELS, Spelling(np.array(of_text, np.int8)))
    assert [(each.label, *each.tokens) for each in found] == expected
    assert all(each.start is None and each.text is None for each in found)
    assert all(each.score > 0.99 for each in found)


@pytest.fixture(scope="module")
def task() -> Task:
    """A task that finds a person in every token."""
    head = make_head(np.random.default_rng(3), shallow().config.hidden_size, 4, kind="token-classification")
    tensors = {"kernel": np.zeros_like(head.tensors["kernel"]), "bias": np.array([0, 0, 9, 0], np.float32)}
    own = make_task(shallow(), "people", [random_delta("lora", shallow().config, 50)], Head(head.type, tensors))
    return dataclasses.replace(own, labels=LABELS)


@pytest.fixture
def asked(engine: Engine, task: Task) -> Iterator[Engine]:
    engine.add_task(task)
    yield engine
    engine.remove_task(task.id)


def spans(engine: Engine, query: Query) -> list[tuple[int, int]]:
    (result,) = engine.infer([query])
    assert isinstance(result, Tokens), result.error
    return [each.tokens for each in result.entities]


def words(engine: Engine, text: str) -> int:
    return len(engine.text.encode(Query(None, text), Preprocessing()).ids) - 2


def test_entities_of_every_form_of_query(asked: Engine) -> None:
    first, second = words(asked, TEXT), words(asked, PAIR)
    both = [(1, 1 + first), (2 + first, 2 + first + second)]
    assert spans(asked, Query("people", TEXT)) == both[:1]
    assert spans(asked, Query("people", TEXT, PAIR)) == both
    tokens = asked.text.encode(Query(None, TEXT, PAIR), Preprocessing())
    ids = Query("people", input_ids=tokens.ids.tolist(), token_type_ids=tokens.types.tolist())
    assert spans(asked, ids) == both


@pytest.mark.parametrize(
    ("rule", "before", "pair"),
    [
        (Preprocessing(prefix="which library : "), "which library : ", None),
        (Preprocessing(template="which {text} is it"), "which ", None),
        (Preprocessing(template="which {text_pair} is {text}"), "which ", PAIR),
    ],
)
def test_what_a_task_sets_around_texts_is_of_none(
    asked: Engine, task: Task, rule: Preprocessing, before: str, pair: str | None
) -> None:
    asked.add_task(dataclasses.replace(task, preprocessing=rule))
    start = 1 + words(asked, before)
    first = words(asked, pair or TEXT)
    expected = [(start, start + first)]
    if pair is not None:
        start += first + words(asked, "is")
        expected.append((start, start + words(asked, TEXT)))
    assert spans(asked, Query("people", TEXT, pair)) == expected


def test_a_text_that_spells_special_tokens_has_them(asked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Hugging Face's pipelines; the same token ids are another query."""
    monkeypatch.setattr(asked, "responses", ResponseCache(1 << 20))
    query = Query("people", f"{TEXT} [SEP] {TEXT}")
    ids = asked.text.encode(query, Preprocessing()).ids.tolist()
    assert spans(asked, query) == [(1, len(ids) - 1)]
    assert len(spans(asked, Query("people", input_ids=ids))) == 2
    assert spans(asked, query) == [(1, len(ids) - 1)]
    assert (asked.responses.hits, asked.responses.misses) == (1, 2)


def test_special_tokens_have_no_label_in_tensors() -> None:
    logits, own = says("B-LOC", "B-PER", "I-PER"), np.array([-1, 0, -1], np.int8)
    rows = [
        Tokens(
            task="people",
            tokens=3,
            timing=Timing(0, 0, "", "", False),
            logits=logits,
            names=LABELS,
            spelling=Spelling(own),
        )
    ]
    found = tensors_of(rows)
    assert found["label"].tolist() == [["", "B-PER", ""]]
    assert (found["score"] > 0.9).tolist() == [[False, True, False]]


def test_special_tokens_do_not_count_for_agreement() -> None:
    spelling = Spelling(np.array([-1, 0, -1], np.int8))
    tokens = [Encoded(np.zeros(3, np.int32), np.zeros(3, np.int32), spelling=spelling)]
    a, b = [says("B-LOC", "B-PER", "I-PER")], [says("O", "B-PER", "O")]
    assert agreement(of_texts(a, tokens), of_texts(b, tokens), Head("token-classification")) == 1.0
    assert agreement(a, b, Head("token-classification")) == pytest.approx(1 / 3)
