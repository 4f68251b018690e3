"""Questions: the best span of a context, and engines that find it in mixed batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dense_answer, make_head, make_task, random_delta, shallow

from jpets.engine.engine import Engine
from jpets.engine.queue.response_cache import ResponseCache
from jpets.engine.results.numbers import softmax
from jpets.errors import InvalidInput, InvalidTask
from jpets.passage import Passage
from jpets.spans import MAX_ANSWER_TOKENS, best_span
from jpets.types import Answer, Preprocessing, Query, Span, Task

QUESTION = "Which library is it?"
CONTEXT = "It is a library of functions for sparse matrices, written in Fortran."


def brute_force(logits: np.ndarray, passage: Passage, longest: int) -> dict[tuple[int, int], float]:
    """The probability of every span, as Hugging Face's pipeline computes it: other tokens masked out of the softmax."""
    masked = np.full(logits.shape, -1e30)
    masked[passage.start : passage.end] = logits[passage.start : passage.end]
    if passage.null:
        masked[0] = logits[0]
    probs = np.exp(masked - masked.max(0))
    probs /= probs.sum(0)
    starts = range(passage.start, passage.end)
    return {
        (start, end): float(probs[start, 0] * probs[end - 1, 1])
        for start in starts
        for end in range(start + 1, min(start + longest, passage.end) + 1)
    }


@st.composite
def questions(draw: st.DrawFn) -> tuple[np.ndarray, Passage, int]:
    count = draw(st.integers(2, 12))
    start = draw(st.integers(1, count - 1))
    end = draw(st.integers(start + 1, count))
    numbers = st.floats(-30, 30, width=32)
    logits = np.array(draw(st.lists(st.tuples(numbers, numbers), min_size=count, max_size=count)), np.float32)
    return logits, Passage(start, end, draw(st.booleans())), draw(st.integers(1, count))


@given(questions())
def test_no_span_is_better(question: tuple[np.ndarray, Passage, int]) -> None:
    logits, passage, longest = question
    every = brute_force(logits, passage, longest)
    start, end, score = best_span(logits, passage, longest)
    assert score == pytest.approx(every[start, end], rel=1e-9)
    assert every[start, end] == pytest.approx(max(every.values()), rel=1e-9)


def test_the_first_of_equal_spans_is_the_answer() -> None:
    logits = np.zeros((5, 2), np.float32)
    for null, probability in ((False, 1 / 16), (True, 1 / 25)):
        start, end, score = best_span(logits, Passage(1, 5, null), 3)
        assert (start, end) == (1, 2) and score == pytest.approx(probability)


def test_scores_too_small_for_a_product_still_have_an_order() -> None:
    logits = np.array([[3e4, 3e4], [0, 0], [1, 1], [0, 0]], np.float32)
    assert best_span(logits, Passage(1, 4, True)) == (2, 3, 0.0)


@pytest.fixture(scope="module")
def task() -> Task:
    head = make_head(np.random.default_rng(3), shallow().config.hidden_size, 2, kind="question-answering")
    return make_task(shallow(), "questions", [random_delta("lora", shallow().config, 50)], head)


@pytest.fixture
def asked(engine: Engine, task: Task) -> Iterator[Engine]:
    engine.add_task(task)
    yield engine
    engine.remove_task("questions")


def test_questions_share_batches_with_others(asked: Engine, task: Task) -> None:
    pair = Query("questions", QUESTION, CONTEXT)
    tokens = asked.text.encode(pair, Preprocessing(), passage=True)
    assert tokens.passage is not None
    ids = Query("questions", input_ids=tokens.ids.tolist(), token_type_ids=tokens.types.tolist())
    span, other, bare, *rest = asked.infer(
        [pair, Query("mask", QUESTION), ids, Query("questions", CONTEXT), Query("questions", QUESTION, " ")]
    )
    assert {type(result.error) for result in (span, other, bare)} == {type(None)}
    assert isinstance(span, Span) and isinstance(bare, Span)
    expected = dense_answer(shallow(), task, tokens.ids, tokens.types)["logits"]
    np.testing.assert_allclose(span.logits, expected, atol=1e-4)
    every = brute_force(span.logits, tokens.passage, MAX_ANSWER_TOKENS)
    assert (span.start, span.end) == max(every, key=every.__getitem__)
    assert span.score == pytest.approx(every[span.start, span.end])
    assert span.tokens == len(tokens.ids)
    assert span.answer is not None
    assert span.answer == tokens.passage.answer(span.start, span.end)
    assert span.answer.text == CONTEXT[span.answer.start : span.answer.end]
    np.testing.assert_allclose(bare.logits, span.logits, atol=1e-4)
    assert (bare.start, bare.end, bare.answer) == (span.start, span.end, None)
    assert isinstance(rest[0].error, InvalidInput) and "a question alone" in rest[0].error.message
    assert isinstance(rest[1].error, InvalidInput)


def test_virtual_tokens_shift_no_answer(engine: Engine, task: Task) -> None:
    """A prompt's tokens are never part of an answer."""
    led = dataclasses.replace(task, id="led-questions", deltas=(random_delta("prompt", shallow().config, 51),))
    engine.add_task(led)
    (span,) = engine.infer([Query(led.id, QUESTION, CONTEXT)])
    engine.remove_task(led.id)
    tokens = engine.text.encode(Query(led.id, QUESTION, CONTEXT), Preprocessing(), passage=True)
    assert isinstance(span, Span) and tokens.passage is not None
    np.testing.assert_allclose(span.logits, dense_answer(shallow(), led, tokens.ids, tokens.types)["logits"], atol=1e-4)
    assert span.answer == tokens.passage.answer(span.start, span.end)


def test_a_question_may_wait_for_its_task(engine: Engine, task: Task) -> None:
    engine.register_task("questions", lambda: task)
    (span,) = engine.infer([Query("questions", QUESTION, CONTEXT)])
    engine.remove_task("questions")
    assert isinstance(span, Span)
    assert span.answer is not None and span.answer.text in CONTEXT


def test_a_kept_answer_has_the_words_of_each_text(asked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that differ only in letters that the tokenizer drops have equal tokens, but each its own answer."""
    monkeypatch.setattr(asked, "responses", ResponseCache(1 << 20))
    shifted = f"  {CONTEXT.upper()}"
    ids = asked.text.encode(Query("questions", QUESTION, CONTEXT), Preprocessing()).ids.tolist()
    types = asked.text.encode(Query("questions", QUESTION, CONTEXT), Preprocessing()).types.tolist()
    queries = [
        Query("questions", QUESTION, CONTEXT),
        Query("questions", QUESTION, shifted),
        Query("questions", input_ids=ids, token_type_ids=types),
        Query("questions", QUESTION, CONTEXT),
    ]
    spans = [result for query in queries for result in asked.infer([query])]
    assert (asked.responses.hits, asked.responses.misses) == (3, 1)
    first, upper, bare, again = [span for span in spans if isinstance(span, Span)]
    assert all((span.start, span.end) == (first.start, first.end) for span in (first, upper, bare, again))
    assert isinstance(first.answer, Answer)
    assert again.answer == first.answer
    assert upper.answer == Answer(first.answer.text.upper(), first.answer.start + 2, first.answer.end + 2)
    assert bare.answer is None


def test_the_place_of_the_context_is_part_of_what_is_kept(asked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question with a separator in its text has the token ids of another question and context."""
    monkeypatch.setattr(asked, "responses", ResponseCache(1 << 20))
    spelled = Query("questions", "which [SEP] library", "a chess engine")
    tokens = asked.text.encode(spelled, Preprocessing())
    ids, types = tokens.ids.tolist(), tokens.types.tolist()
    bare = Query("questions", input_ids=ids, token_type_ids=types)
    one, two = [asked.infer([query])[0] for query in (spelled, bare)]
    assert (asked.responses.hits, asked.responses.misses) == (0, 2)
    assert isinstance(one, Span) and isinstance(two, Span)
    np.testing.assert_array_equal(softmax(one.logits), softmax(two.logits))
    assert one.start > types.index(1) - 1
    assert ids.index(3) < two.start < types.index(1)


def test_heads_that_answer_no_questions_are_refused(engine: Engine, task: Task) -> None:
    wide = make_head(np.random.default_rng(0), shallow().config.hidden_size, 3, kind="question-answering")
    for wrong in (dataclasses.replace(task, head=wide), dataclasses.replace(task, labels=("start", "end"))):
        with pytest.raises(InvalidTask, match="needs 2 outputs, start and end, and no labels"):
            engine.add_task(wrong)
