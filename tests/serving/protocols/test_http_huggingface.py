"""/hf: what Hugging Face's own client sends and reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import pytest
from clients import Call
from huggingface_hub import InferenceClient
from listening import listening
from support import make_head, make_task, random_delta, tiny
from transformers.pipelines.token_classification import TokenClassificationPipeline

from jpets.engine.engine import Engine
from jpets.engine.results.entities import aggregated, of_windows
from jpets.engine.results.numbers import normalized, sigmoid, softmax
from jpets.errors import TooLarge
from jpets.passage import Passage
from jpets.spans import best_spans, no_answer
from jpets.tokenizing import Tokens as Encoded
from jpets.types import Classification, Embedding, FloatArray, Preprocessing, Query, Regression, Side, Span, Tokens
from serving.app import create_app
from serving.hosted.service import Service
from serving.protocols.huggingface_answers import KINDS, Asked
from serving.requests import windows

PATH = "/hf/questions"
QUESTION, CONTEXT = "Who plays?", "Anna and her brother play chess."
TEXT, OTHERS = "Anna plays chess in the library", ("a chess engine", "soup")
ASKED = {"question": QUESTION, "context": CONTEXT}


def test_hugging_faces_client_understands_the_answer(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it holds for this machine as well
    (span,) = engine.infer([Query("questions", QUESTION, CONTEXT)])
    assert isinstance(span, Span) and span.answer is not None
    with listening(create_app(service)) as url:
        client = huggingface_hub.InferenceClient(model=url + PATH, token="none")
        found = client.question_answering(QUESTION, CONTEXT, top_k=1, align_to_words=False, max_answer_len=30)
        assert not isinstance(found, list)
        again = client.question_answering(
            QUESTION, CONTEXT, align_to_words=False, max_answer_len=30, max_question_len=64
        )
        huggingface_hub.close_session()
    assert (found.answer, found.start, found.end) == (span.answer.text, span.answer.start, span.answer.end)
    assert found.answer == CONTEXT[found.start : found.end]
    assert found.score == pytest.approx(span.score, rel=1e-4)
    assert again == found


Ask = Callable[[str], InferenceClient]


def test_classes_of_a_text(client: Ask, engine: Engine) -> None:
    (topic, tags, price) = engine.infer([Query(task, TEXT) for task in ("topic", "tags", "price")])
    assert isinstance(topic, Classification) and isinstance(tags, Classification) and isinstance(price, Regression)
    found = client("topic").text_classification(TEXT)
    assert [own.label for own in found] == [topic.names[at] for at in np.argsort(-topic.probs)]
    assert [own.score for own in found] == pytest.approx(sorted(topic.probs, reverse=True), rel=1e-4)
    assert client("topic").text_classification(TEXT, top_k=1) == found[:1]
    raw = client("topic").text_classification(TEXT, function_to_apply="none")
    assert {own.label: own.score for own in raw} == pytest.approx(
        dict(zip(topic.names, topic.logits, strict=True)), rel=1e-3
    )
    each = client("topic").text_classification(TEXT, function_to_apply="sigmoid")
    assert [own.score for own in each] == pytest.approx(sorted(sigmoid(topic.logits), reverse=True), rel=1e-3)
    several = client("tags").text_classification(TEXT)
    assert {own.label: own.score for own in several} == pytest.approx(
        dict(zip(tags.names, tags.probs, strict=True)), rel=1e-3
    )
    (value,) = client("price").text_classification(TEXT)
    assert value.label == "label-0" and value.score == pytest.approx(price.score, rel=1e-3)
    as_probability = client("price").text_classification(TEXT, function_to_apply="sigmoid")
    assert as_probability[0].score == pytest.approx(float(sigmoid(price.logits)[0]), rel=1e-3)


@pytest.mark.parametrize(("relevance", "probability"), [(None, False), ("sigmoid", True), ("raw", False)])
def test_a_single_output_is_a_probability_unless_it_is_said_to_be_a_value(relevance: Any, probability: bool) -> None:
    """As the pipeline has it: a model that learnt a value says ``problem_type: regression``."""
    plain = make_task(tiny(), "value", [], make_head(np.random.default_rng(0), tiny().config.hidden_size, 1))
    task = dataclasses.replace(
        plain, head=dataclasses.replace(plain.head, problem="regression", relevance=relevance), labels=("toxic",)
    )
    asked = Asked(task, [TEXT], None, {})
    result = Regression(task="value", tokens=1, logits=np.array([2.0], np.float32), score=2.0, names=("toxic",))
    ((found,),) = KINDS["text_classification"].respond(asked, [result])
    assert found["label"] == "toxic"
    assert found["score"] == pytest.approx(float(sigmoid(result.logits)[0]) if probability else 2.0)


def test_long_templates_and_lists_are_refused_before_they_are_multiplied(call: Call) -> None:
    """A thousand labels in a template of a megabyte would be a gigabyte of texts."""
    labels, template = [f"label {number}" for number in range(1000)], "{} " + "a" * 100_000
    told = {"candidate_labels": labels, "hypothesis_template": template}
    plain = make_task(tiny(), "nli", [], make_head(np.random.default_rng(0), tiny().config.hidden_size, 3))
    task = dataclasses.replace(plain, labels=("entailment", "neutral", "contradiction"))
    with pytest.raises(TooLarge, match="1000 labels in a template of 100003 characters"):
        KINDS["zero_shot_classification"].queries(Asked(task, ["a"], None, told))
    tokens = {"inputs": TEXT, "parameters": {"ignore_labels": [str(number) for number in range(100_000)]}}
    assert call("POST", "/hf/names", json=tokens).status_code == 200


def test_a_text_is_read_in_windows_or_cut(call: Call) -> None:
    body = {"inputs": TEXT, "parameters": {"stride": 2, "truncate": False}}
    answer = call("POST", "/hf/names", json=body)
    assert answer.status_code == 422 and "parameters.truncate" in answer.text


def test_names_in_a_text(client: Ask, engine: Engine) -> None:
    (names,) = engine.infer([Query("names", TEXT)])
    assert isinstance(names, Tokens)
    for how in ("simple", "first", "average", "max", "none", None):
        found = client("names").token_classification(TEXT, aggregation_strategy=how)
        expected = aggregated(names, how or "simple")
        label = "entity" if how == "none" else "entity_group"
        assert [(getattr(own, label), own.start, own.end, own.word) for own in found] == [
            (own.label, own.start, own.end, own.word) for own in expected
        ]
        assert [own.score for own in found] == pytest.approx([own.score for own in expected], rel=1e-4)
    every = client("names").token_classification(TEXT, ignore_labels=[], aggregation_strategy="none")
    assert len(every) == sum(names.spelling.of_text >= 0)  # type: ignore[union-attr]


def test_vectors_of_texts_and_how_alike_they_are(client: Ask, engine: Engine) -> None:
    for name, task in (("vectors", "vectors"), ("tiny-bert", None)):
        results = engine.infer([Query(task, text) for text in (TEXT, *OTHERS)])
        vectors = np.stack([own.embedding for own in results if isinstance(own, Embedding)])
        found = client(name).feature_extraction(TEXT)
        np.testing.assert_allclose(found, vectors[:1], atol=1e-5)
        unit = client(name).feature_extraction(TEXT, normalize=True)
        assert np.linalg.norm(unit) == pytest.approx(1, rel=1e-4)
        unit_vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        alike = client(name).sentence_similarity(TEXT, [*OTHERS])
        assert alike == pytest.approx((unit_vectors[1:] @ unit_vectors[0]).tolist(), abs=1e-4)


LONG = "Anna plays chess in the library of functions. " * 12


def windows_of(engine: Engine, question: str | None, size: int, stride: int) -> list[Encoded]:
    query = Query(None, LONG) if question is None else Query(None, question, LONG)
    return engine.text.windows(query, Preprocessing(), size, stride, passage=question is not None)


def words_of(passage: Passage, start: int, end: int) -> str:
    """The words, as the pipeline divides the context, that these tokens are of."""
    assert passage.text is not None and passage.offsets is not None
    bounds = [match.span() for match in re.finditer(r"\w+|[^\w\s]", passage.text)]
    first, last = passage.offsets[start - passage.start, 0], passage.offsets[end - 1 - passage.start, 1]
    (begin,) = (a for a, b in bounds if a <= first < b)
    (stop,) = (b for a, b in bounds if a < last <= b)
    return passage.text[begin:stop]


def test_answers_are_of_whole_words_unless_told_otherwise(call: Call, engine: Engine) -> None:
    """The vocabulary of the tests spells most words in pieces."""
    passage = engine.text.encode(Query("questions", QUESTION, CONTEXT), Preprocessing(), passage=True).passage
    (span,) = engine.infer([Query("questions", QUESTION, CONTEXT)])
    assert isinstance(span, Span) and passage is not None
    pieces = best_spans(span.logits, passage, 1000, 15)
    assert any(words_of(passage, start, end) != passage.answer(start, end).text for start, end, _ in pieces)  # type: ignore[union-attr]
    for whole in (True, False, None):
        told = {"top_k": 500} if whole is None else {"top_k": 500, "align_to_words": whole}
        found = call("POST", PATH, json={"inputs": ASKED, "parameters": told}).json()
        every: dict[str, float] = {}
        for start, end, score in pieces:
            cut = passage.answer(start, end)
            assert cut is not None
            text = cut.text if whole is False else words_of(passage, start, end)
            every[text.lower()] = every.get(text.lower(), 0.0) + score
        assert {each["answer"].lower(): each["score"] for each in found} == pytest.approx(every, rel=1e-3)


@pytest.mark.parametrize(("side", "status"), [("right", 200), ("Right", 200), ("left", 422), ("both", 422)])
def test_texts_are_cut_on_the_side_that_the_model_has(call: Call, side: str, status: int) -> None:
    """Unless the client says that they are to be cut, or not."""
    for path, body in (
        ("/hf/vectors", {"inputs": TEXT, "truncation_direction": side}),
        ("/hf/vectors", {"inputs": TEXT, "parameters": {"truncation_direction": side}}),
        ("/tei/vectors/embed", {"inputs": TEXT, "truncation_direction": side}),
        ("/tei/topic/predict", {"inputs": TEXT, "truncation_direction": side}),
    ):
        answer = call("POST", path, json=body)
        assert answer.status_code == status
        assert status == 200 or "truncation_direction" in answer.text
        for truncate in (True, False):
            told = call("POST", path, json=body | {"truncate": truncate})
            assert told.status_code == (422 if side == "both" else 200)


def test_a_client_chooses_the_side_on_which_texts_are_cut(call: Call, engine: Engine) -> None:
    text = " ".join(f"word {number}" for number in range(200))
    vectors = {side: asked_embedding(engine, text, side) for side in ("left", "right")}
    assert not np.allclose(vectors["left"], vectors["right"], atol=1e-3)
    for side, expected in vectors.items():
        for path in ("/hf/vectors", "/tei/vectors/embed"):
            body = {"inputs": text, "truncate": True, "truncation_direction": side}
            (found,) = call("POST", path, json=body).json()
            np.testing.assert_allclose(normalized(np.asarray(found)), expected, atol=1e-4)


def asked_embedding(engine: Engine, text: str, side: Side) -> FloatArray:
    (found,) = engine.infer([Query("vectors", text, truncate=side)])
    assert isinstance(found, Embedding)
    return normalized(found.embedding)


def test_answers_from_a_context_longer_than_a_window(client: Ask, engine: Engine) -> None:
    """The best one over all windows, each of which the engine is asked by its token ids."""
    for size, stride in ((64, None), (40, 8)):
        cut = windows_of(engine, QUESTION, size, min(size // 2, 128) if stride is None else stride)
        assert len(cut) > 2
        asked = [Query("questions", input_ids=own.ids.tolist(), token_type_ids=own.types.tolist()) for own in cut]
        every: dict[str, list[float]] = {}
        nothing = 1.0
        for own, result in zip(cut, engine.infer(asked), strict=True):
            assert isinstance(result, Span) and own.passage is not None
            nothing = min(nothing, no_answer(result.logits, own.passage))
            for start, end, score in best_spans(result.logits, own.passage, 16, 15):  # 2 top_k + 10 of each window
                words = words_of(own.passage, start, end)
                every.setdefault(words.lower(), []).append(score)
        best = sorted(every.items(), key=lambda each: -sum(each[1]))
        more = {} if stride is None else {"doc_stride": stride, "max_seq_len": size}
        body = {"inputs": {"question": QUESTION, "context": LONG}, "parameters": {"top_k": 3, **more}}
        several = httpx.post(client("questions").model, json=body).json()  # type: ignore[arg-type]
        assert [each["score"] for each in several] == pytest.approx([sum(scores) for _, scores in best[:3]], rel=1e-3)
        assert [each["answer"].lower() for each in several] == [words for words, _ in best[:3]]
        assert all(each["answer"] == LONG[each["start"] : each["end"]] for each in several)
        body["parameters"] = {"top_k": 1000, "max_answer_len": 1, "handle_impossible_answer": True, **more}
        all_of_them = httpx.post(client("questions").model, json=body).json()  # type: ignore[arg-type]
        (empty,) = [each for each in all_of_them if not each["answer"]]
        assert empty["score"] == pytest.approx(nothing, rel=1e-3)


def test_names_in_a_text_longer_than_a_window(client: Ask, engine: Engine) -> None:
    for how in ("simple", "first", "average", "max"):
        cut = windows_of(engine, None, 64, 12)
        parts = []
        for own, result in zip(
            cut, engine.infer([Query("names", input_ids=own.ids.tolist()) for own in cut]), strict=True
        ):
            assert isinstance(result, Tokens)
            parts.append(aggregated(dataclasses.replace(result, spelling=own.spelling), how, anew=True))
        expected = of_windows(parts)
        found = client("names").token_classification(LONG, aggregation_strategy=how, stride=12)
        assert [(own.entity_group, own.start, own.end, own.word) for own in found] == [
            (own.label, own.start, own.end, own.word) for own in expected
        ]
        pipeline = object.__new__(TokenClassificationPipeline)
        listed = [{"entity_group": e.label, "score": e.score, "start": e.start, "end": e.end} for p in parts for e in p]
        merged = pipeline.aggregate_overlapping_entities(listed)
        assert [(own.entity_group, own.start, own.end) for own in found] == [
            (own["entity_group"], own["start"], own["end"]) for own in merged
        ]


def test_labels_of_ones_own(client: Ask, engine: Engine, service: Service) -> None:
    """As the pipeline has it: softmax over the labels, or of each label against its contradiction."""
    entails = dataclasses.replace(
        make_task(tiny("tiny-bert"), "entails", [random_delta("lora", tiny("tiny-bert").config, 4)],
                  make_head(np.random.default_rng(2), tiny("tiny-bert").config.hidden_size, 3)),
        labels=("contradiction", "neutral", "entailment"),
    )  # fmt: skip
    engine.add_task(entails)
    try:
        labels, template = ["game", "food", "music"], "This text is about {}."
        results = engine.infer([Query("entails", TEXT, template.replace("{}", label)) for label in labels])
        logits = np.stack([own.logits for own in results if isinstance(own, Classification)])
    finally:
        engine.remove_task("entails")
    assert logits.shape == (3, 3)
    asked = Asked(entails, [TEXT], None, {"candidate_labels": labels, "hypothesis_template": template})
    kind = KINDS["zero_shot_classification"]
    assert [own.text_pair for own in kind.queries(asked)] == [template.replace("{}", label) for label in labels]
    found = kind.respond(asked, results)
    assert {own["label"]: own["score"] for own in found} == pytest.approx(
        dict(zip(labels, softmax(logits[:, 2]), strict=True)), rel=1e-4
    )
    each = kind.respond(dataclasses.replace(asked, told={**asked.told, "multi_label": True}), results)
    assert {own["label"]: own["score"] for own in each} == pytest.approx(
        dict(zip(labels, softmax(logits[:, [0, 2]])[:, 1], strict=True)), rel=1e-4
    )
    assert [own["score"] for own in found] == sorted((own["score"] for own in found), reverse=True)


@pytest.mark.parametrize("longest", [1000, 1 << 33, (1 << 63) - 1])
def test_no_answer_is_longer_than_the_context(call: Call, longest: int) -> None:
    usual, more = (
        call("POST", PATH, json={"inputs": ASKED, "parameters": {"max_answer_len": most}}).json()
        for most in (512, longest)
    )
    assert usual == more and usual["answer"]


def test_windows_of_many_texts_are_counted_while_they_are_made(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[windows.Cut] = []
    whole = windows._cut

    def noted(*given: Any, **more: Any) -> windows.Cut:
        made.append(whole(*given, **more))
        return made[-1]

    monkeypatch.setattr(windows, "_cut", noted)
    texts = ["a " * 3000] * 100
    refused = call("POST", "/hf/names", json={"inputs": texts, "parameters": {"stride": 50}})
    assert refused.status_code == 413 and "windows" in refused.text
    assert sum(len(own.queries) for own in made) <= 1024 and len(made) < 10


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/hf/topic", {"inputs": ASKED}, 422, "sequence-classification head"),
        ("/hf/tiny-bert", {"inputs": ASKED}, 422, "no head"),
        ("/hf/no-such", {"inputs": ASKED}, 404, "no-such"),
        (PATH, {"inputs": {**ASKED, "context": " "}}, 422, "context"),
        (PATH, {"inputs": {"question": QUESTION}}, 422, "context"),
        (PATH, {"inputs": QUESTION}, 422, "answers questions"),
        (PATH, {"inputs": ASKED, "parameters": {"multi_label": True}}, 422, "parameters.multi_label"),
        ("/hf/topic", {"inputs": "a", "parameters": {"aggregation_strategy": "max"}}, 422, "aggregation_strategy"),
        ("/hf/topic", {"inputs": "a", "parameters": {"candidate_labels": ["b"]}}, 422, "label entailment"),
        ("/hf/topic", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 422, "sentence_similarity cannot use"),
        ("/hf/names", {"inputs": "a", "parameters": {"aggregation_strategy": "best"}}, 422, "aggregation_strategy"),
        ("/hf/vectors", {"inputs": [], "normalize": True}, 422, "no inputs"),
        ("/hf/tiny-bert", {"inputs": "a", "prompt_name": "query"}, 422, "there are no prompts"),
        (
            PATH,
            {"inputs": {**ASKED, "context": "word " * 200}, "parameters": {"doc_stride": 63}},
            422,
            "windows of 64 tokens leave room",
        ),
        (PATH, {"inputs": ASKED, "parameters": {"doc_stride": -1}}, 422, "doc_stride"),
        (PATH, {"inputs": {**ASKED, "question": "who " * 70}}, 422, "leave room for 0"),
        (PATH, {"inputs": {**ASKED, "context": "word " * 100_000}}, 413, "windows"),
        (PATH, {"inputs": ASKED, "parameters": {"top_k": 1001}}, 422, "at most 1000 answers"),
        ("/hf/topic", {"inputs": "a", "parameters": {"candidate_labels": ["b"] * 1025}}, 413, "1025 inputs"),
        *(
            ("/hf/topic", {"inputs": "a", "parameters": {"candidate_labels": ["b"], **each}}, 422, "one {}")
            for each in ({"hypothesis_template": text} for text in ("none", "{} is {}", "{}" * 100_000))
        ),
        ("/hf/names", {"inputs": "a", "parameters": {"stride": 1, "aggregation_strategy": "none"}}, 422, "stride"),
        ("/hf/names", {"inputs": "word " * 100}, 422, "the limit is"),
    ],
)
def test_refusals(call: Call, path: str, body: object, status: int, part: str) -> None:
    answer = call("POST", path, json=body)
    assert answer.status_code == status
    assert part in answer.json()["error"]["message"]
