"""/hf: what Hugging Face's own client sends and reads."""

from __future__ import annotations

import huggingface_hub
import pytest
from clients import Call
from listening import listening

from jpets.engine.engine import Engine
from jpets.types import Query, Span
from serving.app import create_app
from serving.hosted.service import Service

PATH = "/hf/questions"
QUESTION, CONTEXT = "Who plays?", "Anna and her brother play chess."
ASKED = {"question": QUESTION, "context": CONTEXT}


def test_hugging_faces_client_understands_the_answer(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it holds for this machine as well
    (span,) = engine.infer([Query("questions", QUESTION, CONTEXT)])
    assert isinstance(span, Span) and span.answer is not None
    with listening(create_app(service)) as url:
        client = huggingface_hub.InferenceClient(model=url + PATH, token="none")
        found = client.question_answering(QUESTION, CONTEXT)
        assert not isinstance(found, list)
        again = client.question_answering(QUESTION, CONTEXT, top_k=1, align_to_words=False)
        huggingface_hub.close_session()
    assert (found.answer, found.start, found.end) == (span.answer.text, span.answer.start, span.answer.end)
    assert found.answer == CONTEXT[found.start : found.end]
    assert found.score == pytest.approx(span.score, rel=1e-4)
    assert again == found


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/hf/topic", {"inputs": ASKED}, 422, "sequence-classification head"),
        ("/hf/tiny-bert", {"inputs": ASKED}, 422, "no head"),
        ("/hf/no-such", {"inputs": ASKED}, 404, "no-such"),
        (PATH, {"inputs": {**ASKED, "context": " "}}, 422, "context"),
        (PATH, {"inputs": {**ASKED, "context": "word " * 100}}, 422, "the limit is 64"),
        (PATH, {"inputs": {"question": QUESTION}}, 422, "context"),
        (PATH, {"inputs": QUESTION}, 422, "inputs"),
        (PATH, {"inputs": ASKED, "parameters": {"top_k": 2}}, 422, "parameters.top_k"),
        (PATH, {"inputs": ASKED, "parameters": {"handle_impossible_answer": True}}, 422, "handle_impossible_answer"),
        (PATH, {"inputs": ASKED, "parameters": {"doc_stride": 8}}, 422, "parameters.doc_stride"),
    ],
)
def test_refusals(call: Call, path: str, body: object, status: int, part: str) -> None:
    answer = call("POST", path, json=body)
    assert answer.status_code == status
    assert part in answer.json()["error"]["message"]
