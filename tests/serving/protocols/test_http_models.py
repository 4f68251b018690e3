"""``/v1/models``, and fields that OpenAI's clients send besides texts."""

from __future__ import annotations

from typing import Any

import pytest
from clients import Call

EMBED = "/v1/embeddings"


def test_models_are_the_backbone_and_the_tasks(call: Call) -> None:
    answer = call("GET", "/v1/models").json()
    assert answer["object"] == "list"
    items = {item["id"]: item for item in answer["data"]}
    assert set(items) == {"tiny-bert", *(task["id"] for task in call("GET", "/v1/tasks").json()["tasks"])}
    for id, item in items.items():
        assert (item["object"], item["owned_by"]) == ("model", "jpets")
        assert call("GET", f"/v1/models/{id}").json() == item
    assert items["topic"]["created"] > 1_500_000_000
    assert call("GET", "/v1/models/no-such").status_code == 404
    assert call("GET", "/v1/models/no/such").status_code == 404


@pytest.mark.parametrize(
    "more",
    [
        {"user": None},
        {"encoding_format": None},
        {"dimensions": None},
        {"dimensions": 64},
        {"truncate": None},
        {"encoding_format": "float", "user": "me", "dimensions": 64},
    ],
)
@pytest.mark.parametrize("model", ["tiny-bert", "vectors"])
def test_fields_that_are_null_or_say_what_comes_anyway(call: Call, model: str, more: dict[str, Any]) -> None:
    plain = call("POST", EMBED, json={"model": model, "input": "hello"}).json()
    answer = call("POST", EMBED, json={"model": model, "input": "hello", **more})
    assert answer.status_code == 200 and answer.json()["data"] == plain["data"]


def test_dimensions_that_no_model_gives(call: Call) -> None:
    for dimensions, part in ((65, "dimensions: 'tiny-bert' gives 64"), (0, "dimensions"), (-1, "dimensions")):
        answer = call("POST", EMBED, json={"model": "tiny-bert", "input": "a", "dimensions": dimensions})
        assert answer.status_code == 422
        assert part in answer.json()["error"]["message"]


def test_null_is_as_if_absent_elsewhere(call: Call) -> None:
    nothing = {"truncate": None, "top_k": None, "user": None, "inputs": None}
    assert call("POST", "/v1/classify", json={"model": "topic", "input": "a", **nothing}).status_code == 200
    mixed = {"inputs": [{"model": None, "text": "a", "text_pair": None}], "model": None, "input": None}
    assert call("POST", "/v1/classify", json=mixed).status_code == 200
    asked = {"inputs": {"question": "who?", "context": "a chess engine"}, "parameters": None}
    assert call("POST", "/hf/questions", json=asked).status_code == 200
    assert call("POST", "/v1/tasks/topic/rollback", json={"version": None}).status_code == 404
