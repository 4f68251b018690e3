"""Masks over every protocol, against what transformers' pipeline answered to the same texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from clients import Call, client_of
from few_tasks import serving_few
from huggingface_hub import InferenceClient
from listening import listening
from masked import MASKED, masked_task
from support import random_delta, tiny

from jpets.engine.engine import Engine
from jpets.engine.queue.response_cache import ResponseCache
from jpets.engine.results.fills import best_fills
from jpets.types import Fills, Query
from serving.app import create_app
from serving.hosted.repository import Validator
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.requests import ask

KNOWN = json.loads((MASKED / "bert" / "answers.json").read_text(encoding="utf-8"))
TEXT, TWO = KNOWN["answers"][0]["text"], KNOWN["answers"][1]["text"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, validator: Validator) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("masked")
    task = masked_task(folder / "model")
    tuned = dataclasses.replace(task, id="tuned", deltas=(random_delta("lora", tiny().config, seed=3),))
    with serving_few(folder, [task, tuned], validator) as service:
        yield service


@pytest.fixture
def call(service: Service) -> Call:
    return client_of(service, ServingSettings())


def same(found: Any, expected: Any) -> None:
    """Answers to a text: of one mask, or a list for each of several."""
    if isinstance(expected[0], list):
        for own, other in zip(found, expected, strict=True):
            same(own, other)
        return
    for one, other in zip(found, expected, strict=True):
        assert (one["token"], one["token_str"], one["sequence"]) == (
            other["token"], other["token_str"], other["sequence"],
        )  # fmt: skip
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


@pytest.mark.parametrize("known", KNOWN["answers"], ids=lambda known: ascii(known["text"]))
def test_words_are_the_pipelines(call: Call, known: dict[str, Any]) -> None:
    found = call("POST", "/hf/words", json={"inputs": known["text"], "parameters": {"top_k": 3}})
    assert found.status_code == 200, found.text
    same(found.json(), known["answer"])
    among = {"inputs": known["text"], "parameters": {"targets": KNOWN["targets"]}}
    same(call("POST", "/hf/words", json=among).json(), known["among"])
    word, listed = (
        call("POST", "/hf/words", json={"inputs": known["text"], "parameters": {"targets": given}}).json()
        for given in ("library", ["library"])
    )
    assert word == listed


def test_hugging_faces_client(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it holds for this machine as well
    with listening(create_app(service)) as url:
        client = InferenceClient(model=f"{url}/hf/words", token="none")
        found = client.fill_mask(TEXT, top_k=2)
        among = client.fill_mask(TEXT, targets=["library"])
        huggingface_hub.close_session()
    best = KNOWN["answers"][0]["answer"][:2]
    assert [(own.token, own.token_str, own.sequence) for own in found] == [
        (own["token"], own["token_str"], own["sequence"]) for own in best
    ]
    assert [own.token_str for own in among] == ["library"]


def test_several_texts_and_five_words_by_default(call: Call) -> None:
    one, two = call("POST", "/hf/words", json={"inputs": [TEXT, TWO]}).json()
    assert len(one) == 5 and [len(own) for own in two] == [5, 5]


def test_a_kept_answer_has_the_masks_and_the_head_of_its_query(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are not kept: a head has as many numbers as the vocabulary."""
    engine = service.engine
    assert isinstance(engine, Engine)
    monkeypatch.setattr(engine, "responses", ResponseCache(1 << 20))
    first, again = (engine.infer([Query("words", TEXT)])[0] for _ in range(2))
    assert isinstance(first, Fills) and isinstance(again, Fills) and engine.responses.hits == 1
    assert again.timing is not None and again.timing.program == "cache"
    assert best_fills(first) == best_fills(again)
    (kept,) = engine.responses._kept.values()
    assert isinstance(kept, Fills) and not kept.tensors and not len(kept.masked.ids)


def test_classes_are_the_words_and_their_texts(call: Call) -> None:
    body = {"model": "words", "input": [TEXT, TWO], "top_k": 1}
    first, second = call("POST", "/v1/classify", json=body).json()["data"]
    best = KNOWN["answers"][0]["answer"][0]
    ((fill,),) = first["fills"]
    assert (fill["token"], fill["text"], fill["sequence"]) == (best["token"], best["token_str"], best["sequence"])
    assert [own[0]["token"] for own in second["fills"]] == [own[0]["token"] for own in KNOWN["answers"][1]["answer"]]
    mixed = [{"model": "words", "text": TEXT}, {"model": "words", "text": "none"}, {"model": None, "text": "a"}]
    found = call("POST", "/v1/classify", json={"inputs": mixed}).json()["data"]
    assert found[0]["fills"] and "write [MASK]" in found[1]["error"]["message"] and found[2]["embedding"]


def test_the_open_inference_protocol(call: Call) -> None:
    texts = {"name": "text", "shape": [2], "datatype": "BYTES", "data": [TEXT, TWO]}
    outputs = call("POST", "/v2/models/words/infer", json={"inputs": [texts]}).json()["outputs"]
    found = {own["name"]: np.array(own["data"]).reshape(own["shape"]) for own in outputs}
    best = [KNOWN["answers"][0]["answer"][0], *(own[0] for own in KNOWN["answers"][1]["answer"])]
    assert found["lengths"].tolist() == [1, 2] and found["token"].tolist()[0] == [best[0]["token"], -1]
    assert found["text"].tolist() == [[best[0]["token_str"], ""], [own["token_str"] for own in best[1:]]]
    described = call("GET", "/v2/models/words").json()["outputs"]
    assert [own["name"] for own in described] == [*(own["name"] for own in outputs), "json"]
    asked = {"inputs": [texts], "outputs": [{"name": "json"}], "parameters": {"top_k": 2}}
    (rows,) = call("POST", "/v2/models/words/infer", json=asked).json()["outputs"]
    body = {"model": "words", "input": [TEXT, TWO], "top_k": 2}
    for row, expected in zip(rows["data"], call("POST", "/v1/classify", json=body).json()["data"], strict=True):
        own = json.loads(row)["fills"]
        assert [[each["token"] for each in mask] for mask in own] == [
            [each["token"] for each in mask] for mask in expected["fills"]
        ]
        assert {len(mask) for mask in own} == {2}


def test_a_delta_changes_the_words(service: Service, call: Call) -> None:
    engine = service.engine
    assert isinstance(engine, Engine)
    plain, tuned = engine.infer([Query("words", TEXT), Query("tuned", TEXT)])
    assert isinstance(plain, Fills) and isinstance(tuned, Fills)
    assert np.abs(plain.outputs - tuned.outputs).max() > 1e-3
    assert call("GET", "/v1/tasks/words").json()["head"] == "fill-mask"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/hf/words", {"inputs": "no mask"}, "write [MASK]"),
        ("/hf/words", {"inputs": "[MASK] " * 65}, "the limit is 32"),
        ("/hf/words", {"inputs": TEXT, "parameters": {"targets": [""]}}, "targets"),
        ("/hf/words", {"inputs": TEXT, "parameters": {"targets": []}}, "targets: expected 1 to"),
        ("/hf/words", {"inputs": TEXT, "parameters": {"targets": ["a"] * 1001}}, "targets: expected 1 to"),
        ("/hf/words", {"inputs": TEXT, "parameters": {"top_k": 101}}, "top_k: expected at most 100"),
        ("/v1/classify", {"model": "words", "input": TEXT, "top_k": 101}, "top_k: expected at most 100"),
        ("/hf/words", {"inputs": ["[MASK] " * 29] * 9}, "261 masks, at most 256"),
        ("/hf/words", {"inputs": TEXT, "parameters": {"function_to_apply": "none"}}, "fill_mask takes"),
        ("/hf/words", {"inputs": {"question": "a", "context": "b"}}, "fill-mask head"),
        ("/v1/classify", {"model": "words", "input": TEXT, "windows": True}, "windows"),
        ("/v1/embeddings", {"model": "words", "input": TEXT}, "fill-mask head"),
        ("/pooling", {"model": "words", "input": TEXT}, "fill-mask head"),
        ("/tei/words/predict", {"inputs": TEXT}, "fill-mask head"),
    ],
)
def test_what_masks_cannot_be_asked(call: Call, path: str, body: dict[str, Any], named: str) -> None:
    answer = call("POST", path, json=body)
    assert answer.status_code in (400, 413, 422), answer.text
    assert named in answer.text, answer.text


def test_masks_of_one_task_are_not_the_others_error(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "MOST_MASKS", 40)
    text = "[MASK] " * 29
    answer = call("POST", "/v1/fanout", json={"tasks": ["words", "tuned"], "text": text})
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["data"]
    assert "error" not in first and "58 masks, at most 40" in second["error"]["message"]


def test_text_embeddings_inference_has_no_such_model(call: Call) -> None:
    answer = call("GET", "/tei/words/info")
    assert answer.status_code == 422 and "fill-mask" in answer.text
