"""/v1/classify: every head, mixtures, errors."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from clients import Call
from support import wait_until

from jpets.engine.engine import Engine
from jpets.engine.results.entities import aggregated
from jpets.types import Classification, Embedding, Query, Regression, Span, Tokens

PATH = "/v1/classify"


def test_answers_what_the_engine_computes(call: Call, engine: Engine) -> None:
    texts = ["hello world", "a longer text of some words"]
    expected = engine.infer([Query("topic", text) for text in texts])
    answer = call("POST", PATH, json={"model": "topic", "input": texts, "top_k": 2}).json()
    assert (answer["object"], answer["model"]) == ("list", "topic")
    assert [item["index"] for item in answer["data"]] == [0, 1]
    for item, result in zip(answer["data"], expected, strict=True):
        assert isinstance(result, Classification)
        assert (item["label"], item["num_classes"]) == (result.label, 3)
        np.testing.assert_allclose(item["probs"], result.probs, rtol=1e-5)
        assert math.isclose(sum(item["probs"]), 1, rel_tol=1e-5)
        assert item["top"][0]["label"] == result.label
        assert len(item["top"]) == 2
        assert item["top"][0]["prob"] >= item["top"][1]["prob"]
    tokens = sum(result.tokens for result in expected)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_one_text_needs_no_list(call: Call) -> None:
    data = call("POST", PATH, json={"model": "topic", "input": "hello"}).json()["data"]
    assert len(data) == 1
    assert "top" not in data[0]


def test_mixed_request_shares_a_batch_and_answers_by_head(call: Call, engine: Engine, all_at_once: None) -> None:
    models = ["topic", "tags", "price", "names", "vectors", None, "tiny-bert", "questions"]
    texts: list[dict[str, Any]] = [
        {"text": "hello world", **({"text_pair": "a world"} if m == "questions" else {})} for m in models
    ]
    names_of = [m if m != "tiny-bert" else None for m in models]
    # Tasks of earlier tests may hold the slots; a query of a task that has to be brought runs in a batch of its own.
    results = engine.infer([Query(m, **own) for m, own in zip(names_of, texts, strict=True)])
    wait_until(lambda: engine.report().idle)  # a query that an earlier test gave up may still run
    batches = engine.stats.batches
    answer = call("POST", PATH, json={"inputs": [{"model": m, **own} for m, own in zip(models, texts, strict=True)]})
    assert answer.status_code == 200
    data = answer.json()["data"]
    assert engine.stats.batches == batches + 1
    assert [item["model"] for item in data] == models
    topic, tags, price, names, vectors, plain, _, questions = results
    assert isinstance(topic, Classification) and data[0]["label"] == topic.label
    assert isinstance(tags, Classification) and data[1]["labels"] == list(tags.labels)
    assert "labels" not in data[0]
    assert isinstance(price, Regression)
    np.testing.assert_allclose(data[2]["values"], price.logits, rtol=1e-4)
    assert isinstance(names, Tokens)
    assert [(e["label"], e["start"], e["end"], e["text"], e["tokens"]) for e in data[3]["entities"]] == [
        (e.label, e.start, e.end, e.text, [*e.tokens]) for e in names.entities
    ]
    assert isinstance(vectors, Embedding) and isinstance(plain, Embedding)
    np.testing.assert_allclose(data[4]["embedding"], vectors.embedding, atol=1e-5)
    np.testing.assert_allclose(data[5]["embedding"], plain.embedding, atol=1e-5)
    assert data[5]["embedding"] == data[6]["embedding"]
    assert isinstance(questions, Span) and questions.answer is not None
    found = {name: data[7][name] for name in ("answer", "start", "end")}
    assert found == {
        "answer": questions.answer.text,
        "start": questions.answer.start,
        "end": questions.answer.end,
    }
    assert math.isclose(data[7]["score"], questions.score, rel_tol=1e-4)


def test_a_question_alone_is_refused(call: Call) -> None:
    alone = call("POST", PATH, json={"model": "questions", "input": "who plays?"})
    assert (alone.status_code, alone.json()["error"]["code"]) == (422, "invalid_input")
    assert "a question alone; send the text to find the answer in as text_pair" in alone.json()["error"]["message"]
    (item,) = call("POST", PATH, json={"inputs": [{"model": "questions", "text": "who plays?"}]}).json()["data"]
    assert item["error"]["code"] == "invalid_input"


def test_an_answer_is_of_the_second_text(call: Call) -> None:
    context = "Anna and her brother play chess."
    inputs = [{"model": "questions", "text": "Who plays?", "text_pair": text} for text in (context, "")]
    found, refused = call("POST", PATH, json={"inputs": inputs}).json()["data"]
    assert found["answer"] == context[found["start"] : found["end"]]
    assert refused["error"]["code"] == "invalid_input"


def test_a_failure_of_the_server_is_in_its_log(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    """By the number that its client got; what a client did wrong is not."""
    failed = call("POST", PATH, json={"model": "broken", "input": "a"}).json()["error"]
    assert call("POST", PATH, json={"model": "no-such", "input": "a"}).status_code == 404
    (line,) = [record for record in caplog.records if record.name == "serving.http.errors"]
    assert vars(line)["request_id"] == failed["request_id"] and vars(line)["code"] == failed["code"] == "not_finite"


def test_mixed_request_fails_row_by_row(call: Call) -> None:
    inputs = [
        {"model": "topic", "text": "fine", "text_pair": "a pair"},
        {"model": "no-such", "text": "hello"},
        {"model": "topic", "text": " "},
        {"model": "broken", "text": "hello"},
    ]
    data = call("POST", PATH, json={"inputs": inputs}).json()["data"]
    assert "error" not in data[0]
    codes = [item["error"]["code"] for item in data[1:]]
    assert codes == ["not_found", "invalid_input", "not_finite"]


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"model": "no-such", "input": "a"}, 404, "no-such"),
        ({"model": "topic", "input": "  "}, 422, "empty"),
        ({"model": "topic", "input": ["fine", ""]}, 422, "input 1: the text is empty"),
        ({"model": "topic", "input": []}, 422, "no inputs"),
        ({"model": "topic", "input": "word " * 100}, 422, "the limit is 64"),
        ({"model": "vectors", "input": "a"}, 422, "/v1/embeddings"),
        ({"model": "tiny-bert", "input": "a"}, 422, "/v1/embeddings"),
        ({"model": "broken", "input": "a"}, 500, "NaN"),
        ({"model": "topic", "input": ["a"] * 10_000}, 413, "10000 inputs, the limit is 1024"),
        ({"inputs": [{"text": "a"}] * 1025}, 413, "1025 inputs"),
        ({"model": "topic"}, 422, "either model and input, or tasks and input, or inputs"),
        ({"model": "topic", "input": "a", "inputs": []}, 422, "either model and input, or tasks and input, or inputs"),
        ({"model": "topic", "input": 3}, 422, "input"),
        ({"model": "topic", "input": "a", "top_k": 0}, 422, "top_k"),
        ({"model": "topic", "input": "a", "beam": 1}, 422, "beam"),
        *(
            ({"model": model, "input": [["who?", "a chess engine"]], "top_k": 1, **more}, 422, f"top_k: {model!r} has")
            for model in ("price", "names", "questions")
            for more in ({}, {"windows": True})
        ),
        *(
            ({"model": model, "input": "a", "aggregation": "simple", **more}, 422, f"aggregation: {model!r} has")
            for model in ("topic", "price", "questions")
            for more in ({}, {"windows": True})
        ),
        ({"model": "m" * 300, "input": "a"}, 422, "model"),
        ([1, 2], 422, "body"),
    ],
)
def test_refusals(call: Call, body: object, status: int, part: str) -> None:
    answer = call("POST", PATH, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert part in error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]


def test_too_long_names_both_lengths_and_fits_when_truncated(call: Call, engine: Engine) -> None:
    text = "a " * 100
    message = call("POST", PATH, json={"model": "topic", "input": text}).json()["error"]["message"]
    assert "102 tokens" in message and "64" in message
    answer = call("POST", PATH, json={"model": "topic", "input": text, "truncate": True})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 64


def test_half_a_surrogate_pair_is_refused(call: Call) -> None:
    body = b'{"model": "topic", "input": "secret \\ud800"}'
    answer = call("POST", PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("wrong", "model", "part"),
    [
        ({"model": "topic", "text": ""}, "topic", "empty"),
        ({"model": "topic", "text": 5}, "topic", "text: Input should be a valid string"),
        ({"model": "topic", "text": None}, "topic", "text"),
        ({"model": "topic"}, "topic", "text: Field required"),
        ({"model": "topic", "text": "half \ud800"}, "topic", "text"),
        ({"model": "topic", "text": "a", "text_pair": ["b"]}, "topic", "text_pair"),
        ({"model": "topic", "text": "a", "txt_pair": "b"}, "topic", "txt_pair"),
        ({"model": 7, "text": "a"}, None, "model"),
        ({"model": "m" * 200, "text": "a"}, None, "model"),
        ({"model": "\ud800", "text": "a"}, None, "model"),
        ("a text", None, "expected an object"),
        (None, None, "expected an object"),
    ],
)
def test_one_malformed_input_has_its_own_error(call: Call, wrong: object, model: str | None, part: str) -> None:
    fine = {"model": "topic", "text": "fine"}
    content = json.dumps({"inputs": [fine, wrong, {**fine, "model": "tags"}]})
    answer = call("POST", PATH, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    first, refused, last = answer.json()["data"]
    assert first["label"] and last["labels"] is not None
    assert (refused["index"], refused["model"]) == (1, model)
    assert refused["error"]["code"] == "invalid_input" and part in refused["error"]["message"]


def test_a_request_of_malformed_inputs_alone(call: Call) -> None:
    answer = call("POST", PATH, json={"inputs": [{"text": 1}, 2]})
    assert [item["error"]["code"] for item in answer.json()["data"]] == ["invalid_input"] * 2
    assert answer.json()["usage"]["total_tokens"] == 0
    assert call("POST", PATH, json={"inputs": [1] * 1025}).status_code == 413


def test_pairs_of_texts_by_one_task(call: Call, engine: Engine) -> None:
    pairs = [["it rains", "rain is falling"], ["a", "b"]]
    data = call("POST", "/v1/classify", json={"model": "topic", "input": pairs}).json()["data"]
    expected = engine.infer([Query("topic", first, second) for first, second in pairs])
    for item, result in zip(data, expected, strict=True):
        assert isinstance(result, Classification)
        np.testing.assert_allclose(item["probs"], result.probs, atol=1e-5)
    for wrong in ([["a"]], [["a", "b", "c"]], [["a", "b"], "c"]):
        answer = call("POST", "/v1/classify", json={"model": "topic", "input": wrong})
        assert answer.status_code == 422 and "input" in answer.json()["error"]["message"]


def test_entities_are_put_together_as_asked(call: Call, engine: Engine) -> None:
    (names,) = engine.infer([Query("names", "Anna plays chess")])
    assert isinstance(names, Tokens)
    for how in ("none", "simple", "first", "average", "max"):
        asked = {"model": "names", "input": "Anna plays chess", "aggregation": how}
        (item,) = call("POST", "/v1/classify", json=asked).json()["data"]
        expected = [(own.label, own.start, own.end, own.word) for own in aggregated(names, how)]
        assert [(own["label"], own["start"], own["end"], own["word"]) for own in item["entities"]] == expected
    wrong = call("POST", "/v1/classify", json={"model": "names", "input": "a", "aggregation": "best"})
    assert wrong.status_code == 422 and "aggregation" in wrong.json()["error"]["message"]
