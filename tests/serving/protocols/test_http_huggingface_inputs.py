"""/hf: pairs of texts, texts that are too long, and what clients send beside them."""

from __future__ import annotations

from typing import Any

import pytest
from clients import Call

from jpets.engine.results.entities import aggregated
from serving.protocols import huggingface_answers

TEXT = "Anna plays chess in the library"


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
