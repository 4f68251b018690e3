"""vLLM's options: outputs as they are, and how much of a text is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from clients import Call

from jpets.engine.engine import Engine
from jpets.engine.results.numbers import sigmoid
from jpets.types import Classification, Query, Regression

TEXT, OTHER = "a chess engine", "the library"
LONG = "the file for a library the for a " * 20
ROUTES: dict[str, dict[str, Any]] = {
    "/classify": {"model": "topic", "input": [LONG]},
    "/v1/classify": {"model": "price", "input": [[TEXT, LONG]]},
    "/pooling": {"model": "tags", "input": [LONG]},
    "/v1/embeddings": {"model": "vectors", "input": LONG},
    "/score": {"model": "price", "text_1": TEXT, "text_2": LONG},
    "/rerank": {"model": "price", "query": TEXT, "documents": [LONG]},
}


def test_classes_have_their_outputs_or_probabilities(call: Call, engine: Engine) -> None:
    (topic, tags, price) = engine.infer([Query(task, TEXT) for task in ("topic", "tags", "price")])
    assert isinstance(topic, Classification) and isinstance(tags, Classification) and isinstance(price, Regression)
    for result, probs in ((topic, topic.probs), (tags, tags.probs), (price, price.logits)):
        for activated, expected in ((None, probs), (True, probs), (False, result.logits)):
            asked = {"model": result.task, "input": TEXT, "use_activation": activated}
            (found,) = call("POST", "/classify", json=asked).json()["data"]
            np.testing.assert_allclose(found["probs"], expected, rtol=1e-3)
            assert found["num_classes"] == len(expected) and "label" in found


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_pairs_have_their_output_or_its_sigmoid(call: Call, engine: Engine, path: str) -> None:
    (price,) = engine.infer([Query("price", TEXT, OTHER)])
    assert isinstance(price, Regression)
    texts = {"text_1": TEXT, "text_2": OTHER} if path == "/score" else {"query": TEXT, "documents": [OTHER]}
    for activated, expected in ((None, sigmoid(price.logits)), (True, sigmoid(price.logits)), (False, price.logits)):
        answer = call("POST", path, json={"model": "price", **texts, "use_activation": activated}).json()
        (found,) = answer["data"] if path == "/score" else answer["results"]
        assert found.get("score", found.get("relevance_score")) == pytest.approx(float(expected[0]), rel=1e-3)


@pytest.mark.parametrize("path", ROUTES)
def test_so_many_tokens_are_read(call: Call, engine: Engine, path: str) -> None:
    for most, read in ((12, 12), (1000, engine.longest), (-1, engine.longest)):
        answer = call("POST", path, json=ROUTES[path] | {"truncate_prompt_tokens": most})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["total_tokens"] == read
    short = call("POST", path, json=ROUTES[path] | {"truncate_prompt_tokens": 12, "truncate": True})
    assert short.json()["usage"]["total_tokens"] == 12
    for wrong, part in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2}, "leaves no room"),
        ({"truncate_prompt_tokens": 12, "truncate": False}, "leave one out"),
        ({}, "the limit is"),
    ):
        refused = call("POST", path, json=ROUTES[path] | {"truncate": None} | wrong)
        assert refused.status_code == 422 and part in refused.json()["error"]["message"], refused.text


def test_what_is_read_is_the_texts_first_tokens(call: Call, engine: Engine) -> None:
    tokens = engine.text.tokenizer.encode(LONG, add_special_tokens=False)
    tokens.truncate(10)
    ids = engine.text.tokenizer.post_process(tokens, None, True).ids
    assert len(ids) == 12
    (expected,) = engine.infer([Query("topic", input_ids=ids)])
    assert isinstance(expected, Classification)
    (found,) = call("POST", "/classify", json=ROUTES["/classify"] | {"truncate_prompt_tokens": 12}).json()["data"]
    np.testing.assert_allclose(found["probs"], expected.probs, atol=1e-5)


@pytest.mark.parametrize("path", ["/pooling", "/v1/embeddings"])
def test_token_ids_are_not_cut(call: Call, path: str) -> None:
    asked = {"model": "vectors", "input": [2, 9, 9, 9, 3]}
    for most, status in ((5, 200), (4, 422)):
        answer = call("POST", path, json=asked | {"truncate_prompt_tokens": most})
        assert answer.status_code == status
    assert "never truncated" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"model": "names", "input": TEXT, "use_activation": False}, "use_activation: 'names' has"),
        ({"tasks": ["topic"], "input": TEXT, "use_activation": True}, "use_activation"),
        ({"inputs": [{"model": "topic", "text": TEXT}], "truncate_prompt_tokens": 9}, "send model and input"),
        ({"model": "topic", "input": TEXT, "windows": True, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"model": "topic", "input": TEXT, "windows": True, "use_activation": False}, "use_activation"),
    ],
)
def test_what_does_not_go_together_is_refused(call: Call, body: dict[str, Any], part: str) -> None:
    answer = call("POST", "/v1/classify", json=body)
    assert answer.status_code == 422 and part in answer.json()["error"]["message"]
