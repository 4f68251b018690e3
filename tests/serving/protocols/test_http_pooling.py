"""``POST /pooling``: the numbers of every head, as its own route and the engine have them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from clients import Call

from jpets.engine.engine import Engine
from jpets.types import Classification, Embedding, Query, Regression, Tokens

TEXTS = ["hello world", "a"]


def numbers(call: Call, model: str, **more: Any) -> list[Any]:
    answer = call("POST", "/pooling", json={"model": model, "input": TEXTS, **more}).json()
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "pooling"), (1, "pooling")]
    assert answer["usage"]["total_tokens"] > 0 and answer["model"] == model and answer["id"].startswith("pool-")
    return [item["data"] for item in answer["data"]]


def test_every_head(call: Call, engine: Engine) -> None:
    for found, result in zip(numbers(call, "topic"), engine.infer([Query("topic", t) for t in TEXTS]), strict=True):
        assert isinstance(result, Classification)
        np.testing.assert_allclose(found, result.probs, atol=1e-6)
    raw = numbers(call, "tags", task="classify", use_activation=False)
    for found, result in zip(raw, engine.infer([Query("tags", t) for t in TEXTS]), strict=True):
        assert isinstance(result, Classification)
        np.testing.assert_allclose(found, result.logits, atol=1e-6)
    for found, result in zip(numbers(call, "price"), engine.infer([Query("price", t) for t in TEXTS]), strict=True):
        assert isinstance(result, Regression)
        np.testing.assert_allclose(found, result.logits, atol=1e-6)
    tokens = numbers(call, "names", task="token_classify")
    for found, result in zip(tokens, engine.infer([Query("names", t) for t in TEXTS]), strict=True):
        assert isinstance(result, Tokens)
        assert np.shape(found) == result.logits.shape
        np.testing.assert_allclose(np.sum(found, axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(np.argmax(found, 1), np.argmax(result.logits, 1))
    for model, task in (("vectors", "vectors"), ("tiny-bert", None)):
        for found, result in zip(numbers(call, model), engine.infer([Query(task, t) for t in TEXTS]), strict=True):
            assert isinstance(result, Embedding)
            np.testing.assert_allclose(found, result.embedding, atol=1e-6)


def test_base64_and_fewer_dimensions(call: Call) -> None:
    (whole, _), (coded, _) = numbers(call, "vectors"), numbers(call, "vectors", encoding_format="base64")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), whole, atol=1e-6)
    short, _ = numbers(call, "vectors", dimensions=4)
    np.testing.assert_allclose(
        np.array(short) / np.linalg.norm(short), whole[:4] / np.linalg.norm(whole[:4]), atol=1e-5
    )


@pytest.mark.parametrize(
    "body",
    [
        {"model": "questions", "input": "a"},
        {"model": "topic", "input": "a", "task": "embed"},
        {"model": "vectors", "input": "a", "task": "classify"},
        {"model": "vectors", "input": "a", "use_activation": True},
        {"model": "vectors", "input": "a", "dimensions": 4096},
        {"model": "topic", "input": "a", "dimensions": 2},
        {"model": "topic", "input": []},
        {"model": "topic", "input": "a", "task": "token_embed"},
        {"model": "topic", "input": "a", "softmax": True},
    ],
)
def test_what_it_refuses(call: Call, body: dict[str, Any]) -> None:
    answer = call("POST", "/pooling", json=body)
    assert answer.status_code == 422 and answer.json()["error"]["message"]


def test_unknown_tasks(call: Call) -> None:
    assert call("POST", "/pooling", json={"model": "none-such", "input": "a"}).status_code == 404
