"""The Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clients import Call

from jpets.engine.engine import Engine
from jpets.errors import Saturated
from jpets.types import Classification, Embedding, Query, Regression, Result, Span, TaskName, Tokens
from serving.hosted.service import Service
from serving.protocols.oip.inference import Asked, Model
from serving.protocols.oip.parameters import Parameters

TEXT: dict[str, Any] = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["hello world", "a"]}


JSON = {"name": "json"}


def ids(**change: Any) -> dict[str, Any]:
    return {"name": "input_ids", "shape": [2, 3], "datatype": "INT64", "data": [2, 9, 3, 2, 3, 0], **change}


def mask(**change: Any) -> dict[str, Any]:
    return {"name": "attention_mask", "shape": [2, 3], "datatype": "INT64", "data": [1, 1, 1, 1, 1, 0], **change}


def infer(call: Call, model: str, *inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = call("POST", f"/v2/models/{model}/infer", json={"inputs": inputs, **more})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return {"response": body} | {
        each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in body["outputs"]
    }


def test_server_and_health(call: Call) -> None:
    assert call("GET", "/v2").json()["name"] == "jpets"
    assert call("GET", "/v2/health/live").json() == {"live": True}
    assert call("GET", "/v2/health/ready").json() == {"ready": True}


def test_model_metadata(call: Call) -> None:
    names = call("GET", "/v2/models/names").json()
    assert names["versions"] == ["1"]
    assert {each["name"]: each["shape"] for each in names["outputs"]} == {
        "logits": [-1, -1, 3],
        "label": [-1, -1],
        "score": [-1, -1],
        "lengths": [-1],
        "json": [-1],
    }
    plain = call("GET", "/v2/models/tiny-bert").json()
    assert plain["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 64]}]
    assert {each["name"] for each in plain["inputs"]} >= {"text", "input_ids"}
    assert call("GET", "/v2/models/names/versions/1").json() == names
    assert call("GET", "/v2/models/names/versions/7").status_code == 404
    assert call("GET", "/v2/models/names/ready").json() == {"name": "names", "ready": True}
    assert call("GET", "/v2/models/names/versions/1/ready").status_code == 200
    assert call("GET", "/v2/models/no-such/ready").status_code == 404


def test_classification(call: Call, engine: Engine) -> None:
    got = infer(call, "topic", TEXT, id="mine")
    results = [r for r in engine.infer([Query("topic", t) for t in TEXT["data"]]) if isinstance(r, Classification)]
    assert got["response"]["id"] == "mine"
    assert (got["response"]["model_name"], got["response"]["model_version"]) == ("topic", "1")
    np.testing.assert_allclose(got["logits"], [r.logits for r in results], atol=1e-4)
    np.testing.assert_allclose(got["score"], [r.score for r in results], atol=1e-5)
    assert got["label"].tolist() == [r.label for r in results]
    assert [each["datatype"] for each in got["response"]["outputs"]] == ["FP32", "BYTES", "FP32", "FP32"]
    np.testing.assert_allclose(got["probs"], [r.probs for r in results], atol=1e-5)


def test_versions_of_the_url(call: Call) -> None:
    body = {"inputs": [TEXT]}
    assert call("POST", "/v2/models/topic/versions/1/infer", json=body).status_code == 200
    assert call("POST", "/v2/models/topic/versions/2/infer", json=body).status_code == 404


def test_other_heads(call: Call, engine: Engine) -> None:
    price = infer(call, "price", TEXT)
    (expected, _) = engine.infer([Query("price", t) for t in TEXT["data"]])
    assert isinstance(expected, Regression)
    assert price["logits"].shape == (2, 1) and "label" not in price
    np.testing.assert_allclose(price["score"][0], expected.score, rtol=1e-4)
    plain = infer(call, "tiny-bert", TEXT)
    (vector, _) = engine.infer([Query(None, t) for t in TEXT["data"]])
    assert isinstance(vector, Embedding)
    np.testing.assert_allclose(plain["embedding"][0], vector.embedding, atol=1e-5)


def test_token_head_pads_to_the_longest(call: Call, engine: Engine) -> None:
    got = infer(call, "names", TEXT)
    results = [r for r in engine.infer([Query("names", t) for t in TEXT["data"]]) if isinstance(r, Tokens)]
    assert got["lengths"].tolist() == [r.tokens for r in results]
    assert got["logits"].shape == (2, max(r.tokens for r in results), 3)
    for row, result in enumerate(results):
        np.testing.assert_allclose(got["logits"][row, : result.tokens], result.logits, atol=1e-4)
        assert not got["logits"][row, result.tokens :].any()
        assert got["label"][row, 1] == result.names[int(result.logits[1].argmax())]
        assert set(got["label"][row, result.tokens - 1 :]) == {got["label"][row, 0]} == {""}  # special tokens, padding
        assert not got["score"][row, 0]


def test_questions(call: Call, engine: Engine) -> None:
    metadata = call("GET", "/v2/models/questions").json()["outputs"]
    assert {each["name"]: (each["datatype"], each["shape"]) for each in metadata} == {
        "logits": ("FP32", [-1, -1, 2]),
        "start": ("INT64", [-1]),
        "end": ("INT64", [-1]),
        "score": ("FP32", [-1]),
        "answer": ("BYTES", [-1]),
        "lengths": ("INT64", [-1]),
        "json": ("BYTES", [-1]),
    }
    pairs = [("who?", "a chess engine"), ("which library is it?", "one for sparse matrices")]
    texts = {"name": "text", "shape": [2], "datatype": "BYTES", "data": [pair[0] for pair in pairs]}
    contexts = {"name": "text_pair", "shape": [2], "datatype": "BYTES", "data": [pair[1] for pair in pairs]}
    got = infer(call, "questions", texts, contexts)
    assert [(each["name"], each["datatype"]) for each in got["response"]["outputs"]] == [
        (each["name"], each["datatype"]) for each in metadata[:-1]
    ]
    results = [r for r in engine.infer([Query("questions", *pair) for pair in pairs]) if isinstance(r, Span)]
    assert got["lengths"].tolist() == [r.tokens for r in results]
    assert got["logits"].shape == (2, max(r.tokens for r in results), 2)
    assert list(zip(got["start"], got["end"], strict=True)) == [(r.start, r.end) for r in results]
    np.testing.assert_allclose(got["score"], [r.score for r in results], rtol=1e-4)
    assert got["answer"].tolist() == [r.answer.text for r in results if r.answer is not None]
    for row, result in enumerate(results):
        np.testing.assert_allclose(got["logits"][row, : result.tokens], result.logits, atol=1e-4)
        assert not got["logits"][row, result.tokens :].any()
    by_ids = infer(call, "questions", ids(data=[2, 9, 3, 2, 8, 9]))
    assert by_ids["answer"].tolist() == ["", ""]
    assert (by_ids["end"] > by_ids["start"]).all()


def test_token_ids_with_a_mask(call: Call, engine: Engine) -> None:
    types = {"name": "token_type_ids", "shape": [2, 3], "datatype": "INT64", "data": [[0, 0, 1], [0, 0, 0]]}
    got = infer(call, "topic", ids(), mask(), types)
    first = Query("topic", input_ids=[2, 9, 3], token_type_ids=[0, 0, 1])
    second = Query("topic", input_ids=[2, 3])
    results = [r for r in engine.infer([first, second]) if isinstance(r, Classification)]
    np.testing.assert_allclose(got["logits"], [r.logits for r in results], atol=1e-4)


def test_pairs_outputs_and_truncation(call: Call, engine: Engine) -> None:
    long = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a " * 200]}
    pair = {"name": "text_pair", "shape": [1], "datatype": "BYTES", "data": ["b"]}
    got = infer(call, "topic", long, pair, outputs=[{"name": "label"}], parameters={"truncate": True})
    (result,) = engine.infer([Query("topic", "a " * 200, "b", truncate=True)])
    assert isinstance(result, Classification)
    assert [each["name"] for each in got["response"]["outputs"]] == ["label"]
    assert got["label"].tolist() == [result.label]


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ([{**TEXT, "datatype": "FP32"}], "text: expected datatype BYTES, found 'FP32'"),
        ([{**TEXT, "shape": [3]}], "text: shape [3] needs 3 values, found 2"),
        ([{**TEXT, "shape": [2, 1]}], "text: expected shape [N]"),
        ([{**TEXT, "shape": [0], "data": []}], "text: expected shape [N]"),
        ([{**TEXT, "data": ["a", 1]}], "text: expected texts, found int"),
        ([{**TEXT, "data": ["a", "\ud800"]}], "text: expected valid Unicode"),
        ([TEXT, TEXT], "each name once"),
        ([TEXT, ids()], "expected text (and text_pair), or input_ids"),
        ([mask()], "expected text (and text_pair), or input_ids"),
        ([], "expected text (and text_pair), or input_ids"),
        ([{**TEXT, "name": "prompt"}], "found ['prompt']"),
        ([ids(datatype="INT32")], "input_ids: expected datatype INT64, found 'INT32'"),
        ([ids(shape=[6])], "input_ids: expected shape [N, L]"),
        ([ids(shape=[3, 3])], "input_ids: shape [3, 3] needs 9 values, found 6"),
        ([ids(data=[[2, 9, 3], [2, 3]])], "input_ids: expected data of shape [2, 3]"),
        ([ids(data=[2, 9, 3, 2, 3, 0.5])], "input_ids: expected integers, found float"),
        ([ids(data=[2, 9, 3, 2, 3, 2**70])], "input_ids: expected 64-bit integers"),
        ([ids(data=[2, 9, 3, 2, 3, 800])], "input 1: input_ids must lie in 0..799"),
        ([ids(), mask(data=[0, 1, 1, 1, 1, 1])], "attention_mask: expected ones"),
        ([ids(), mask(data=[1, 1, 1, 0, 0, 0])], "attention_mask: expected ones"),
        ([ids(), mask(shape=[1, 6])], "attention_mask: expected shape [2, 3]"),
    ],
)
def test_wrong_tensors_are_named(call: Call, inputs: list[dict[str, Any]], part: str) -> None:
    content = json.dumps({"inputs": inputs})
    answer = call("POST", "/v2/models/topic/infer", content=content)
    assert answer.status_code == 422
    assert part in answer.json()["error"]


@pytest.mark.parametrize(
    ("model", "body", "status", "part"),
    [
        ("no-such", {"inputs": [TEXT]}, 404, "no-such"),
        ("topic", {"inputs": [{**TEXT, "shape": [10_000]}]}, 413, "the limit is 1024"),
        ("topic", {"inputs": [TEXT], "outputs": [{"name": "embedding"}]}, 422, "['embedding']"),
        ("topic", {"inputs": [TEXT], "parameters": {"temperature": 1}}, 422, "temperature"),
        ("topic", {"inputs": [TEXT], "parameters": {"timeout": 1}}, 504, "deadline"),
        ("topic", {"inputs": [TEXT], "parameters": {"top_k": 2}}, 422, "top_k: it shapes the output json"),
        ("price", {"inputs": [TEXT], "outputs": [JSON], "parameters": {"top_k": 2}}, 422, "top_k: 'price' has a head"),
        ("topic", {"inputs": [TEXT], "outputs": [JSON], "parameters": {"aggregation": "max"}}, 422, "labels no tokens"),
        ("topic", {"inputs": [TEXT], "parameters": {"windows": True}}, 422, "windows: expected the output json alone"),
        ("topic", {"inputs": [ids()], "outputs": [JSON], "parameters": {"windows": True}}, 422, "found input_ids"),
        ("questions", {"inputs": [TEXT], "outputs": [JSON], "parameters": {"windows": True}}, 422, "a question needs"),
        ("topic", {"inputs": [TEXT], "parameters": {"dimensions": 2}}, 422, "dimensions: only vectors"),
        ("vectors", {"inputs": [TEXT], "parameters": {"dimensions": 65}}, 422, "dimensions: 'vectors' gives"),
        ("vectors", {"inputs": [TEXT], "outputs": [JSON]}, 422, "expected some of ['embedding']"),
        ("topic", {}, 422, "inputs"),
        ("broken", {"inputs": [TEXT]}, 500, "NaN"),
    ],
)
def test_refusals(call: Call, model: str, body: object, status: int, part: str) -> None:
    answer = call("POST", f"/v2/models/{model}/infer", json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert part in answer.json()["error"]


RAW: dict[str, Any] = {"name": "text", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 20}}
BYTES = b"\x0b\0\0\0hello world\x01\0\0\0a"


def binary(call: Call, tensor: dict[str, Any], behind: bytes, length: str | None = None, **more: Any) -> Any:
    document = json.dumps({"inputs": [tensor], **more}).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(document))}
    return call("POST", "/v2/models/topic/infer", content=document + behind, headers=headers)


def test_binary_tensors(call: Call) -> None:
    expected = infer(call, "topic", TEXT)
    came = binary(call, RAW, BYTES).json()
    assert came["outputs"] == expected["response"]["outputs"]
    wanted = [{"name": "score", "parameters": {"binary_data": True}}, {"name": "label"}]
    answer = binary(call, RAW, BYTES, outputs=wanted)
    length = int(answer.headers["inference-header-content-length"])
    score, label = json.loads(answer.content[:length])["outputs"]
    assert score == {"name": "score", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    assert label["data"] == expected["label"].tolist()
    np.testing.assert_allclose(np.frombuffer(answer.content[length:], "<f4"), expected["score"], rtol=1e-6)
    whole = binary(call, RAW, BYTES, parameters={"binary_data_output": True})
    assert all("data" not in each for each in json.loads(whole.content.split(b"]}", 1)[0] + b"]}")["outputs"])


@pytest.mark.parametrize(
    ("tensor", "behind", "length", "status", "part"),
    [
        ({**RAW, "parameters": {"binary_data_size": 19}}, BYTES, None, 422, "expected 19 bytes behind the JSON"),
        ({**RAW, "parameters": {"binary_data_size": 21}}, BYTES, None, 422, "expected 21 bytes behind the JSON"),
        ({**RAW, "shape": [1]}, BYTES, None, 422, "needs 1 texts, found 2"),
        ({**RAW, "data": ["a", "b"]}, BYTES, None, 422, "expected data, or binary_data_size"),
        ({**RAW, "parameters": {}}, BYTES, None, 422, "expected data, or binary_data_size"),
        ({**RAW, "parameters": {"binary_data_size": -1}}, BYTES, None, 422, "binary_data_size"),
        (TEXT, b"x", None, 422, "expected 0 bytes behind the JSON, found 1"),
        (RAW, BYTES, "100000", 400, "Inference-Header-Content-Length"),
        (RAW, BYTES, "ten", 400, "Inference-Header-Content-Length"),
        (RAW, BYTES, "5", 400, "not valid JSON"),
    ],
)
def test_wrong_binary_tensors_are_named(
    call: Call, tensor: dict[str, Any], behind: bytes, length: str | None, status: int, part: str
) -> None:
    answer = binary(call, tensor, behind, length)
    assert (answer.status_code, part in answer.json()["error"]) == (status, True), answer.text


def test_bytes_stand_behind_the_json_of_inference_alone(call: Call) -> None:
    headers = {"Inference-Header-Content-Length": "10"}
    answer = call("POST", "/v1/classify", json={"model": "topic", "input": "a"}, headers=headers)
    assert answer.status_code == 422 and "behind the JSON" in answer.text


@pytest.mark.parametrize(
    ("accepted", "coding"), [("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate", None), ("identity", None)]
)
def test_answers_are_packed_where_that_is_asked(call: Call, accepted: str, coding: str | None) -> None:
    answer = call("POST", "/v2/models/topic/infer", json={"inputs": [TEXT]}, headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding") == coding
    assert answer.json()["outputs"] == infer(call, "topic", TEXT)["response"]["outputs"]


def test_repository(call: Call, engine: Engine) -> None:
    index = {each["name"]: each for each in call("POST", "/v2/repository/index").json()}
    assert index["topic"] == {"name": "topic", "version": "1", "state": "READY", "reason": ""}
    assert call("POST", "/v2/repository/index", json={"ready": True}).json() == list(index.values())
    assert call("POST", "/v2/repository/models/topic/unload", json={}).status_code == 200
    assert engine.tier("topic") != "device"
    assert call("POST", "/v2/repository/models/topic/load").status_code == 200
    assert engine.tier("topic") == "device"
    assert call("POST", "/v2/repository/models/no-such/load").status_code == 404
    assert call("POST", "/v2/repository/models/tiny-bert/unload").status_code == 422
    assert call("POST", "/v2/repository/models/topic/load", json={"parameters": {"config": "{}"}}).status_code == 422


def test_loaded_version_is_the_repositorys(service: Service) -> None:
    assert service.tasks.version(TaskName.of("topic")) == service.repository.get("topic").version


def test_a_question_by_ids_among_other_tasks_is_answered_in_tokens(call: Call, service: Service) -> None:
    """There is no text to find the answer in; the other tasks' answers are not lost."""
    tasks = {"name": "task", "shape": [2], "datatype": "BYTES", "data": ["topic", "questions"]}
    one = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [2, 9, 3]}
    answer = call("POST", f"/v2/models/{service.backbone.name}/infer", json={"inputs": [tasks, one]})
    outputs = {each["name"]: each["data"] for each in answer.json()["outputs"]}
    topic, question = map(json.loads, outputs["answer"])
    assert "label" in topic and question["answer"] == "" and len(question["tokens"]) == 2


def test_no_output_named_is_all_outputs(call: Call) -> None:
    asked = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}
    every = call("POST", "/v2/models/topic/infer", json=asked).json()["outputs"]
    assert call("POST", "/v2/models/topic/infer", json=asked | {"outputs": []}).json()["outputs"] == every


def test_a_task_that_is_not_served_is_not_ready(call: Call, service: Service, upload: Callable[..., bytes]) -> None:
    """As where its backbone is not loaded."""
    service.repository.put("elsewhere", memoryview(upload("elsewhere")))
    try:
        index = {each["name"]: each for each in call("POST", "/v2/repository/index").json()}
        assert index["elsewhere"]["state"] == "UNAVAILABLE" and "not loaded" in index["elsewhere"]["reason"]
        assert index["topic"]["state"] == "READY"
        ready = call("POST", "/v2/repository/index", json={"ready": True}).json()
        assert [each["name"] for each in ready] == [name for name in index if name != "elsewhere"]
    finally:
        service.repository.delete("elsewhere")


def test_an_answer_names_the_version_that_made_it() -> None:
    """A version that was named, and another one that came meanwhile, are not one and the same."""

    def made(*versions: int | None) -> list[Result]:
        return [Embedding(task="a", tokens=1, embedding=np.zeros(2, np.float32), version=each) for each in versions]

    def asked(named: bool, *, several: bool = False) -> Asked:
        return Asked(Model("a", None, "2", 2, named), [], [], Parameters(), several)

    for named in (True, False):
        assert asked(named).version(made(2, 2)) == asked(named).version(made(None)) == "2"
        with pytest.raises(Saturated, match="replaced"):
            asked(named).version(made(2, 3))
    assert asked(False).version(made(3, 3)) == "3"
    with pytest.raises(Saturated, match="replaced"):
        asked(True).version(made(3))
    assert asked(True, several=True).version(made(5, 7)) == "2"
