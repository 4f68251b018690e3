"""One text, many tasks."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from clients import Call

from serving.http import fields

TEXT = "a chess engine"
TASKS = ["topic", "tags", "price", "names", "vectors"]


def alone(call: Call, task: str, **more: Any) -> Any:
    return call("POST", "/v1/classify", json={"inputs": [{"model": task, "text": TEXT}], **more}).json()["data"][0]


@pytest.mark.parametrize("route", ["/v1/fanout", "/v1/classify"])
def test_answers_are_those_of_each_task(call: Call, route: str) -> None:
    body = {"tasks": TASKS, "top_k": 2, ("text" if route == "/v1/fanout" else "input"): TEXT}
    answer = call("POST", route, json=body)
    assert answer.status_code == 200
    found = answer.json()["data"]
    assert [(each["index"], each["model"]) for each in found] == list(enumerate(TASKS))
    for task, own in zip(TASKS, found, strict=True):
        expected = alone(call, task, top_k=2)
        assert own.keys() == expected.keys()
        assert own.get("label") == expected.get("label")
        assert own.get("probs", []) == pytest.approx(expected.get("probs", []), abs=1e-5)
    assert answer.json()["usage"]["total_tokens"] > 0


def test_pairs_and_failures_keep_their_places(call: Call) -> None:
    body = {"tasks": ["questions", "no-such", "broken"], "text": "which game?", "text_pair": TEXT}
    answer = call("POST", "/v1/fanout", json=body)
    first, second, third = answer.json()["data"]
    assert answer.status_code == 200 and first["answer"] in TEXT
    assert (second["error"]["code"], third["error"]["code"]) == ("not_found", "not_finite")
    same = call("POST", "/v1/classify", json={"tasks": ["questions"], "input": [["which game?", TEXT]]})
    assert same.json()["data"][0]["answer"] == first["answer"]


def test_a_failure_in_an_answer_is_in_the_log_by_the_number_that_the_client_is_told(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ["broken", "topic", "no-such", "broken"]
    rows = {"inputs": [tensor("text", TEXT), tensor("task", *asked)]}
    for route, body in (
        ("/v1/fanout", {"tasks": asked, "text": TEXT}),
        ("/v1/classify", {"inputs": [{"model": task, "text": TEXT} for task in asked]}),
        ("/v2/models/tiny-bert/infer", rows),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            answer = call("POST", route, json=body)
        (number,) = [vars(record)["request_id"] for record in caplog.records if record.message == "failed"]
        assert (answer.status_code, answer.text.count(f"(request {number})")) == (200, 2)


@pytest.mark.parametrize(
    ("route", "body", "part"),
    [
        ("/v1/fanout", {"tasks": [], "text": TEXT}, "no inputs"),
        ("/v1/fanout", {"tasks": ["topic"]}, "text"),
        ("/v1/fanout", {"text": TEXT}, "tasks"),
        ("/v1/fanout", {"tasks": ["topic"], "text": TEXT, "model": "topic"}, "model"),
        ("/v1/classify", {"tasks": ["topic"], "input": [TEXT, TEXT]}, "one text or pair"),
        ("/v1/classify", {"tasks": ["topic"], "model": "topic", "input": TEXT}, "either model and input"),
        ("/v1/classify", {"tasks": ["topic"]}, "either model and input"),
    ],
)
def test_refusals(call: Call, route: str, body: dict[str, Any], part: str) -> None:
    answer = call("POST", route, json=body)
    assert (answer.status_code, part in answer.text) == (422, True), answer.text


def test_too_many_tasks(call: Call) -> None:
    answer = call("POST", "/v1/fanout", json={"tasks": ["topic"] * 1025, "text": TEXT})
    assert answer.status_code == 413


def tensor(name: str, *texts: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}


def test_over_the_open_inference_protocol(call: Call) -> None:
    asked = ["topic", "no-such", "names", "tiny-bert"]
    body = {"inputs": [tensor("text", TEXT), tensor("task", *asked)]}
    answer = call("POST", "/v2/models/tiny-bert/infer", json=body)
    assert answer.status_code == 200, answer.text
    found = {own["name"]: own["data"] for own in answer.json()["outputs"]}
    answers = [json.loads(each) for each in found["answer"]]
    fanned = call("POST", "/v1/fanout", json={"tasks": asked, "text": TEXT}).json()["data"]
    assert [each.keys() for each in answers] == [each.keys() - {"index", "model"} for each in fanned]
    assert answers[0]["label"] == fanned[0]["label"] and answers[1]["error"]["code"] == "not_found"
    assert answers[2]["entities"] == fanned[2]["entities"] and len(answers[3]["embedding"]) == 64
    assert len(found["shared_layers"]) == len(asked)
    assert {own["name"] for own in call("GET", "/v2/models/tiny-bert").json()["inputs"]} > {"task"}


def test_rows_of_several_tasks(call: Call) -> None:
    body = {"inputs": [tensor("text", TEXT, "soup"), tensor("task", "topic", "price")], "outputs": [{"name": "answer"}]}
    (only,) = call("POST", "/v2/models/tiny-bert/infer", json=body).json()["outputs"]
    topic, price = map(json.loads, only["data"])
    assert topic["label"] == alone(call, "topic")["label"] and price["values"]


@pytest.mark.parametrize(
    ("model", "inputs", "part"),
    [
        ("topic", [tensor("text", TEXT), tensor("task", "tags")], "found ['task']"),
        ("tiny-bert", [tensor("text", TEXT, TEXT), tensor("task", "tags", "topic", "price")], "each of 2 rows"),
        ("tiny-bert", [tensor("task", "tags")], "expected text"),
        ("tiny-bert", [tensor("text", TEXT), tensor("task", "a"), tensor("task", "b")], "each name once"),
        ("tiny-bert", [tensor("text", TEXT), {**tensor("task", "a"), "datatype": "INT64"}], "task: expected datatype"),
    ],
)
def test_refused_tasks_of_rows(call: Call, model: str, inputs: list[dict[str, Any]], part: str) -> None:
    answer = call("POST", f"/v2/models/{model}/infer", json={"inputs": inputs})
    assert (answer.status_code, part in answer.text) == (422, True), answer.text


def test_too_many_tasks_are_refused_before_the_text_is_looked_at(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is checked once, not for each task: a hundred thousand times would stop the server."""
    seen: list[str] = []

    def is_unicode(text: str) -> bool:
        seen.append(text)
        return True

    monkeypatch.setattr(fields, "is_unicode", is_unicode)
    for path, name in (("/v1/fanout", "text"), ("/v1/classify", "input")):
        seen.clear()
        assert call("POST", path, json={"tasks": ["topic"] * 50_000, name: TEXT}).status_code == 413
        assert seen.count(TEXT) == 1
