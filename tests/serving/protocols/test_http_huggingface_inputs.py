"""/hf: pairs of texts, texts that are too long, and what clients send beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from clients import Call
from huggingface_hub import InferenceClient
from support import tiny
from tokenizers import Tokenizer

from checkpoints.task_file import task_to_bytes
from jpets.engine.engine import Engine
from jpets.engine.results.entities import aggregated
from jpets.engine.results.numbers import softmax
from jpets.types import Classification, Query, Task
from serving.protocols import huggingface_answers

TEXT, OTHER = "Anna plays chess in the library", "a chess engine"
LONG = "Anna plays chess in the library of functions. " * 12
LABELS = ["game", "food", "music"]


def test_labels_to_ignore_are_gathered_once_a_request(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds of thousands."""
    found: list[Any] = []

    def noted(result: Any, how: Any, ignored: Any, **more: Any) -> Any:
        found.append(ignored)
        return aggregated(result, how, ignored, **more)

    monkeypatch.setattr(huggingface_answers, "aggregated", noted)
    asked = {"aggregation_strategy": "none", "ignore_labels": ["O", "B-0", "none such"]}
    listed = call("POST", "/hf/names", json={"inputs": [TEXT, "soup", TEXT], "parameters": asked}).json()
    assert all(own["entity"] == "B-1" for each in listed for own in each)
    first, *others = found
    assert first == frozenset(asked["ignore_labels"]) and len(others) == 2
    assert all(each is first for each in others)


@pytest.fixture
def entails(call: Call, make_task: Callable[..., Task]) -> Iterator[str]:
    """A task that says whether the second text follows from the first."""
    task = dataclasses.replace(make_task("entails", seed=9), labels=("contradiction", "neutral", "entailment"))
    assert call("PUT", "/v1/tasks/entails", content=task_to_bytes(task)).status_code == 201
    yield "entails"
    call("DELETE", "/v1/tasks/entails")


def test_of_a_long_text_and_a_hypothesis_the_text_is_cut(
    client: Callable[[str], InferenceClient], call: Call, engine: Engine, entails: str
) -> None:
    """As in the pipeline. The hypothesis has more than half of the tokens that the task takes."""
    read = "was read by Anna who plays chess in the library of functions and of chess"
    template = f"before this a {{}} of the library of functions {read}"
    own = Tokenizer.from_str(tiny().tokenizer_json)
    own.enable_truncation(engine.longest, strategy="only_first")
    queries = []
    for label in LABELS:
        pair = own.encode(LONG, template.replace("{}", label))
        assert len(pair.ids) == engine.longest and pair.sequence_ids.count(1) > engine.longest // 2
        queries.append(Query(entails, input_ids=pair.ids, token_type_ids=pair.type_ids))
    logits = np.array([each.logits[2] for each in engine.infer(queries) if isinstance(each, Classification)])
    found = client(entails).zero_shot_classification(LONG, LABELS, hypothesis_template=template)
    expected = dict(zip(LABELS, softmax(logits).tolist(), strict=True))
    assert {each.label: each.score for each in found} == pytest.approx(expected, rel=1e-3)
    told = {"candidate_labels": LABELS, "hypothesis_template": template, "truncate": False}
    refused = call("POST", f"/hf/{entails}", json={"inputs": LONG, "parameters": told})
    assert refused.status_code == 422 and "the limit is" in refused.json()["error"]["message"]


def test_a_text_may_come_with_a_second_one(call: Call, engine: Engine) -> None:
    pairs = [{"text": TEXT, "text_pair": OTHER}, {"text": TEXT}, {"text": OTHER, "text_pair": TEXT}]
    results = engine.infer([Query("topic", own["text"], own.get("text_pair")) for own in pairs])
    probs = [np.sort(own.probs)[::-1] for own in results if isinstance(own, Classification)]
    listed = call("POST", "/hf/topic", json={"inputs": pairs}).json()
    np.testing.assert_allclose([[each["score"] for each in own] for own in listed], probs, rtol=1e-3)
    for pair, expected in zip(pairs, listed, strict=True):
        (alone,) = call("POST", "/hf/topic", json={"inputs": pair, "parameters": {"top_k": 1}}).json()
        assert [each["label"] for each in alone] == [expected[0]["label"]]


@pytest.mark.parametrize(
    ("task", "body", "part"),
    [
        ("names", {}, "token_classification takes no pairs"),
        ("vectors", {}, "feature_extraction takes no pairs"),
        ("questions", {}, "question_answering takes no pairs"),
        ("topic", {"parameters": {"candidate_labels": ["a"]}}, "zero_shot_classification takes no pairs"),
        ("topic", {"options": {"wait_for_model": 1}}, "wait_for_model"),
        ("topic", {"options": {"use_gpu": True}}, "use_gpu"),
    ],
)
def test_what_is_refused(call: Call, task: str, body: dict[str, Any], part: str) -> None:
    for inputs in ({"text": TEXT, "text_pair": OTHER}, [{"text": TEXT, "text_pair": OTHER}]):
        answer = call("POST", f"/hf/{task}", json={"inputs": inputs, **body})
        assert answer.status_code == 422 and part in answer.json()["error"]["message"], answer.text


def test_options_of_the_former_service_change_nothing(call: Call) -> None:
    plain = call("POST", "/hf/topic", json={"inputs": TEXT}).json()
    for options in ({"wait_for_model": True, "use_cache": False}, {"wait_for_model": None}, {}):
        answer = call("POST", "/hf/topic", json={"inputs": TEXT, "options": options})
        assert answer.status_code == 200
        assert [each["label"] for each in answer.json()[0]] == [each["label"] for each in plain[0]]
