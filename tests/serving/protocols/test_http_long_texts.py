"""/v1/classify: texts that are longer than their task takes, in windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from clients import Call

from jpets.engine.engine import Engine
from jpets.errors import Saturated
from jpets.types import BackboneRef, Classification, Head, Preprocessing, Query, Regression, Result, Task
from serving.protocols.long_texts import averaged

LONG = "Anna plays chess in the library of functions. " * 12
SHORT = "a chess engine"
QUESTION = "Who plays?"


def asked(call: Call, model: str, *texts: Any, **more: Any) -> list[dict[str, Any]]:
    answer = call("POST", "/v1/classify", json={"model": model, "input": [*texts], "windows": True, **more})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    assert [each.pop("index") for each in found] == list(range(len(texts)))
    return found


def windows_of(engine: Engine, task: str, text: str) -> list[Result]:
    """The results of the windows of a text, asked by their token ids."""
    longest = engine.longest
    found = engine.text.windows(Query(None, text), Preprocessing(), longest, min(longest // 2, 128))
    return engine.infer([Query(task, input_ids=own.ids.tolist()) for own in found])


def test_windows_of_two_versions_are_no_answer() -> None:
    def found(*names: str) -> Classification:
        probs = np.full(len(names), 0.5, np.float32)
        return Classification(
            task="topic", tokens=3, logits=probs, probs=probs, label=None, score=0.5, names=names, multi_label=True
        )

    ref = BackboneRef("b", "sha256:0", "bert", 8, 1)
    rule = Preprocessing(thresholds=(0.5, 0.5))
    task = Task("topic", ref, (), Head("sequence-classification"), ("a", "b"), preprocessing=rule)
    assert averaged(task, [found("a", "b"), found("a", "b")]).names == ("a", "b")
    for windows in ([found("a", "b"), found("a", "b", "c")], [found("a", "b"), found("a", "c")], [found("a")]):
        with pytest.raises(Saturated, match="replaced"):
            averaged(task, windows)


def test_probabilities_are_those_of_all_windows(call: Call, engine: Engine) -> None:
    long, short = asked(call, "topic", LONG, SHORT, top_k=1)
    results = [result for result in windows_of(engine, "topic", LONG) if isinstance(result, Classification)]
    assert len(results) > 2
    tokens = np.array([result.tokens for result in results], float)
    probs = np.array([result.probs for result in results]).T @ tokens / tokens.sum()
    assert long["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
    assert long["label"] == results[0].names[int(probs.argmax())] == long["top"][0]["label"]
    alone = call("POST", "/v1/classify", json={"model": "topic", "input": SHORT, "top_k": 1}).json()["data"][0]
    assert short["probs"] == pytest.approx(alone["probs"], abs=1e-5) and short["label"] == alone["label"]


def test_several_labels_and_values(call: Call, engine: Engine) -> None:
    (tags,) = asked(call, "tags", LONG)
    assert tags["labels"] == [f"label-{at}" for at, p in enumerate(tags["probs"]) if p >= 0.5]
    (price,) = asked(call, "price", LONG)
    results = [result for result in windows_of(engine, "price", LONG) if isinstance(result, Regression)]
    tokens = [result.tokens for result in results]
    expected = np.average([result.logits for result in results], axis=0, weights=tokens)
    assert price["values"] == pytest.approx(expected.tolist(), rel=1e-4)


def test_names_and_answers_are_those_of_hugging_faces_client(call: Call) -> None:
    (names,) = asked(call, "names", LONG, aggregation="first")
    parameters = {"aggregation_strategy": "first", "stride": 32}
    expected = call("POST", "/hf/names", json={"inputs": LONG, "parameters": parameters}).json()
    assert [(own["label"], own["start"], own["end"]) for own in names["entities"]] == [
        (own["entity_group"], own["start"], own["end"]) for own in expected
    ]
    (answer,) = asked(call, "questions", [QUESTION, LONG])
    best = call("POST", "/hf/questions", json={"inputs": {"question": QUESTION, "context": LONG}}).json()
    assert (answer["start"], answer["end"], answer["answer"]) == (best["start"], best["end"], best["answer"])


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"inputs": [{"model": "topic", "text": LONG}]}, 422, "windows: send model and input"),
        ({"model": "topic", "input": LONG, "truncate": True}, 422, "without truncate"),
        ({"model": "vectors", "input": LONG}, 422, "embeddings"),
        ({"model": "questions", "input": QUESTION}, 422, "a question needs a text"),
        ({"model": "questions", "input": [[QUESTION, LONG], [QUESTION, ""]]}, 422, "a question needs a text"),
        ({"model": "topic", "input": [LONG * 40] * 40}, 413, "windows, the limit is"),
        ({"model": "broken", "input": LONG}, 500, "NaN"),
    ],
)
def test_refusals(call: Call, body: dict[str, Any], status: int, part: str) -> None:
    answer = call("POST", "/v1/classify", json={**body, "windows": True})
    assert (answer.status_code, part in answer.text) == (status, True), answer.text


def test_without_windows_long_texts_are_refused(call: Call) -> None:
    assert call("POST", "/v1/classify", json={"model": "topic", "input": LONG}).status_code == 422
