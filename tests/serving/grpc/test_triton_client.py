"""Triton's own client with its defaults, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from fastapi import FastAPI
from listening import listening
from tritonclient.utils import InferenceServerException

from jpets.engine.engine import Engine
from jpets.types import Classification, Query, Tokens

TEXTS = ["hello world", "übung macht 🙂", "a"]
LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with listening(app) as url:
        yield url.removeprefix("http://")


@pytest.fixture(params=["http", "grpc"])
def library(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]


@pytest.fixture
def client(library: Any, url: str, address: str) -> Iterator[Any]:
    client = library.InferenceServerClient(url if library is tritonclient.http else address)
    yield client
    client.close()


@pytest.fixture
def texts(library: Any) -> Callable[..., Any]:
    def make(**how: Any) -> Any:
        tensor = library.InferInput("text", [len(TEXTS)], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object), **how)
        return tensor

    return make


@pytest.fixture
def expected(engine: Engine) -> list[Classification]:
    return [r for r in engine.infer([Query("topic", text) for text in TEXTS]) if isinstance(r, Classification)]


def check(answer: Any, expected: list[Classification]) -> None:
    np.testing.assert_allclose(answer.as_numpy("logits"), [r.logits for r in expected], atol=1e-4)
    np.testing.assert_allclose(answer.as_numpy("score"), [r.score for r in expected], atol=1e-5)
    labels = [each.decode() if isinstance(each, bytes) else each for each in answer.as_numpy("label")]
    assert labels == [r.label for r in expected]


def test_server_and_models(client: Any, library: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("topic")
    assert not client.is_model_ready("topic", "7")
    how = {"as_json": True} if library is tritonclient.grpc else {}
    assert client.get_server_metadata(**how)["name"] == "jpets"
    metadata = client.get_model_metadata("topic", **how)
    assert [each["name"] for each in metadata["outputs"]] == ["logits", "label", "score", "probs", "json"]


def test_defaults(client: Any, texts: Callable[..., Any], expected: list[Classification]) -> None:
    check(client.infer("topic", [texts()]), expected)
    answer = client.infer("topic", [texts()], request_id="mine", model_version="1", timeout=10_000_000)
    check(answer, expected)
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "mine"


def test_labels_over_their_thresholds(client: Any, library: Any, texts: Callable[..., Any], engine: Engine) -> None:
    how = {"as_json": True} if library is tritonclient.grpc else {}
    listed = {each["name"]: (each["datatype"], [*each["shape"]]) for each in
              client.get_model_metadata("tags", **how)["outputs"]}  # fmt: skip
    assert [*listed] == ["logits", "label", "score", "probs", "labels", "json"]
    assert listed["labels"][0] == "BYTES" and [int(size) for size in listed["probs"][1]] == [-1, 3]
    results = [r for r in engine.infer([Query("tags", text) for text in TEXTS]) if isinstance(r, Classification)]
    assert any(result.labels for result in results) and any(len(result.labels) < 3 for result in results)
    answer = client.infer("tags", [texts()])
    np.testing.assert_allclose(answer.as_numpy("probs"), [r.probs for r in results], atol=1e-5)
    for found, result in zip(answer.as_numpy("labels"), results, strict=True):
        chosen = json.loads(found)
        assert [each["label"] for each in chosen] == list(result.labels)
        scores = [result.probs[result.names.index(name)] for name in result.labels]
        assert [each["score"] for each in chosen] == pytest.approx(scores, abs=1e-5)


LONG = "Anna plays chess in the library of functions. " * 12


@pytest.mark.parametrize(
    ("task", "text", "pair", "options"),
    [
        ("topic", "a chess engine", None, {"top_k": 2}),
        ("names", "hello übung world 🙂", None, {"aggregation": "first"}),
        ("questions", "Who plays?", "Anna plays chess.", {}),
        ("topic", LONG, None, {"windows": True}),
        ("names", LONG, None, {"windows": True, "aggregation": "max"}),
        ("questions", "Who plays?", LONG, {"windows": True}),
    ],
)
def test_answers_as_json(
    client: Any, library: Any, url: str, task: str, text: str, pair: str | None, options: dict[str, Any]
) -> None:
    """Those of /v1/classify, with entities, answers and their characters."""
    inputs = []
    for name, own in (("text", text), ("text_pair", pair)):
        if own is not None:
            inputs.append(library.InferInput(name, [1], "BYTES"))
            inputs[-1].set_data_from_numpy(np.array([own.encode()], object))
    wanted = [library.InferRequestedOutput("json")]
    (found,) = client.infer(task, inputs, outputs=wanted, parameters=options).as_numpy("json")
    body = {"model": task, "input": [text if pair is None else [text, pair]], **options}
    (expected,) = httpx.post(f"http://{url}/v1/classify", json=body, timeout=60).json()["data"]
    assert expected.pop("index") == 0
    check_json(json.loads(found), expected)


def check_json(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, own in expected.items():
            check_json(found[name], own)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            check_json(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)


def test_shorter_vectors(client: Any, library: Any, texts: Callable[..., Any]) -> None:
    whole = client.infer("vectors", [texts()]).as_numpy("embedding")
    short = client.infer("vectors", [texts()], parameters={"dimensions": 8}).as_numpy("embedding")
    assert short.shape == (len(TEXTS), 8)
    scaled = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, scaled * np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-5)


def test_token_ids(client: Any, library: Any, engine: Engine) -> None:
    ids = np.array([[2, 9, 3], [2, 8, 3]], np.int64)
    tensor = library.InferInput("input_ids", list(ids.shape), "INT64")
    tensor.set_data_from_numpy(ids)
    wanted = [library.InferRequestedOutput("logits"), library.InferRequestedOutput("lengths")]
    answer = client.infer("names", [tensor], outputs=wanted)
    results = [
        r for r in engine.infer([Query("names", input_ids=row.tolist()) for row in ids]) if isinstance(r, Tokens)
    ]
    np.testing.assert_allclose(answer.as_numpy("logits"), [r.logits for r in results], atol=1e-4)
    assert answer.as_numpy("lengths").tolist() == [3, 3]
    assert answer.as_numpy("label") is None


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_http_forms(
    url: str, expected: list[Classification], binary_in: bool, binary_out: bool, packed: str | None
) -> None:
    tensor = tritonclient.http.InferInput("text", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array(TEXTS, object), binary_data=binary_in)
    wanted = [
        tritonclient.http.InferRequestedOutput(name, binary_data=binary_out and name != "score")
        for name in ("logits", "label", "score")
    ]
    client = tritonclient.http.InferenceServerClient(url)
    packing = {"request_compression_algorithm": packed, "response_compression_algorithm": packed}
    check(client.infer("topic", [tensor], outputs=wanted, **packing), expected)
    client.close()


def test_grpc_packed_and_streamed(address: str, expected: list[Classification]) -> None:
    tensor = tritonclient.grpc.InferInput("text", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object))
    client = tritonclient.grpc.InferenceServerClient(address)
    check(client.infer("topic", [tensor], compression_algorithm="gzip"), expected)
    answers: list[tuple[Any, Any]] = []
    client.start_stream(lambda result, error: answers.append((result, error)))
    for at, name in enumerate(("topic", "no-such", "topic")):
        client.async_stream_infer(name, [tensor], request_id=str(at))
    client.stop_stream()
    client.close()
    assert [error is None for _, error in answers] == [True, False, True]
    assert "no-such" in str(answers[1][1])
    check(answers[2][0], expected)


@pytest.mark.parametrize("asked", [True, False])
def test_the_only_answer_to_a_streamed_request_is_the_last(address: str, asked: bool) -> None:
    tensor = tritonclient.grpc.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"hello world"], object))
    client = tritonclient.grpc.InferenceServerClient(address)
    answers: list[tuple[Any, Any]] = []
    client.start_stream(lambda result, error: answers.append((result, error)))
    client.async_stream_infer("topic", [tensor], enable_empty_final_response=asked)
    client.stop_stream()
    client.close()
    ((result, error),) = answers
    assert error is None
    assert result.get_response().parameters["triton_final_response"].bool_param


def test_repository(client: Any, library: Any, engine: Engine) -> None:
    how = {"as_json": True} if library is tritonclient.grpc else {}
    index = client.get_model_repository_index(**how)
    models = index["models"] if isinstance(index, dict) else index
    assert {"topic", "tiny-bert"} <= {each["name"] for each in models}
    client.unload_model("topic")
    assert engine.tier("topic") != "device"
    client.load_model("topic")
    assert engine.tier("topic") == "device"


@pytest.mark.parametrize(("model", "part"), [("no-such", "no-such"), ("broken", "NaN")])
def test_errors_reach_the_client(client: Any, texts: Callable[..., Any], model: str, part: str) -> None:
    with pytest.raises(InferenceServerException, match=part):
        client.infer(model, [texts()])
