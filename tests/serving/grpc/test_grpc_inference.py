"""The Open Inference Protocol over gRPC: the answers of HTTP, and errors as statuses."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from fastapi import FastAPI
from remote import InferRequest, Remote, streaming
from support import wait_until

from jpets.engine.engine import Engine
from jpets.types import Classification, Embedding, Query, Tokens
from serving.grpc import service as rpc
from serving.grpc.messages import SERVICE, InferResponse
from serving.protocols.oip.tensors import raw_of

TEXTS = ["hello world", "a"]
TEXT: dict[str, Any] = {
    "name": "text",
    "shape": [2],
    "datatype": "BYTES",
    "contents": {"bytes_contents": [b"hello world", b"a"]},
}
IDS: dict[str, Any] = {
    "name": "input_ids",
    "shape": [2, 3],
    "datatype": "INT64",
    "contents": {"int64_contents": [2, 9, 3, 2, 3, 3]},
}


def arrays(answer: Any) -> dict[str, np.ndarray]:
    """Outputs by name."""
    found = {}
    for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        if each.datatype == "BYTES":
            texts, at = [], 0
            while at < len(raw):
                length = int.from_bytes(raw[at : at + 4], "little")
                texts.append(raw[at + 4 : at + 4 + length].decode())
                at += 4 + length
            found[each.name] = np.array(texts, object).reshape(each.shape)
        else:
            found[each.name] = np.frombuffer(raw, {"FP32": "<f4", "INT64": "<i8"}[each.datatype]).reshape(each.shape)
    return found


def test_server_and_models(remote: Remote) -> None:
    assert remote("ServerLive").live and remote("ServerReady").ready
    metadata = remote("ServerMetadata")
    assert metadata.name == "jpets" and "binary_tensor_data" in metadata.extensions
    assert remote("ModelReady", name="topic").ready and remote("ModelReady", name="topic", version="1").ready
    names = remote("ModelMetadata", name="names")
    assert (names.name, list(names.versions)) == ("names", ["1"])
    assert {each.name: list(each.shape) for each in names.outputs}["logits"] == [-1, -1, 3]
    assert {each.name for each in names.inputs} >= {"text", "input_ids"}


@pytest.mark.parametrize("raw", [False, True])
def test_classification(remote: Remote, engine: Engine, raw: bool) -> None:
    expected = [r for r in engine.infer([Query("topic", t) for t in TEXTS]) if isinstance(r, Classification)]
    tensor = {name: value for name, value in TEXT.items() if name != "contents"} if raw else TEXT
    more: dict[str, Any] = {"raw_input_contents": [raw_of(np.array(TEXTS))]} if raw else {}
    answer = remote("ModelInfer", model_name="topic", id="mine", inputs=[tensor], **more)
    assert (answer.model_name, answer.model_version, answer.id) == ("topic", "1", "mine")
    found = arrays(answer)
    assert list(found) == ["logits", "label", "score", "probs"]
    np.testing.assert_allclose(found["logits"], [r.logits for r in expected], atol=1e-4)
    assert found["label"].tolist() == [r.label for r in expected]
    np.testing.assert_allclose(found["score"], [r.score for r in expected], atol=1e-5)


@pytest.mark.parametrize("raw", [False, True])
def test_token_ids(remote: Remote, engine: Engine, raw: bool) -> None:
    mask = {"name": "attention_mask", "shape": [2, 3], "datatype": "INT64"}
    ones = [1, 1, 1, 1, 1, 0]
    given: dict[str, Any] = {"inputs": [IDS, {**mask, "contents": {"int64_contents": ones}}]}
    if raw:
        own = {name: value for name, value in IDS.items() if name != "contents"}
        numbers = (IDS["contents"]["int64_contents"], ones)
        given = {"inputs": [own, mask], "raw_input_contents": [raw_of(np.array(each, np.int64)) for each in numbers]}
    found = arrays(remote("ModelInfer", model_name="names", outputs=[{"name": "lengths"}], **given))
    results = engine.infer([Query("names", input_ids=ids) for ids in ([2, 9, 3], [2, 3])])
    assert {name: array.tolist() for name, array in found.items()} == {"lengths": [r.tokens for r in results]}
    assert all(isinstance(result, Tokens) for result in results)


def test_backbone_and_parameters(remote: Remote, engine: Engine) -> None:
    long = "a " * 200
    one = {**TEXT, "shape": [1], "contents": {"bytes_contents": [long.encode()]}}
    with pytest.raises(grpc.RpcError) as refused:
        remote("ModelInfer", model_name="tiny-bert", inputs=[one], parameters={"truncate": {"bool_param": False}})
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    given = {"truncate": {"bool_param": True}, "timeout": {"int64_param": 20_000_000}}
    answer = remote("ModelInfer", model_name="tiny-bert", inputs=[one], parameters=given)
    (expected,) = engine.infer([Query(None, long, truncate=True)])
    assert isinstance(expected, Embedding)
    np.testing.assert_allclose(arrays(answer)["embedding"][0], expected.embedding, atol=1e-5)


def test_many_tasks_on_one_text(remote: Remote, engine: Engine) -> None:
    text = {**TEXT, "shape": [1], "contents": {"bytes_contents": [b"hello world"]}}
    names = {**TEXT, "name": "task", "shape": [3], "contents": {"bytes_contents": [b"topic", b"no-such", b"names"]}}
    found = arrays(remote("ModelInfer", model_name="tiny-bert", inputs=[text, names]))
    topic, unknown, tagged = map(json.loads, found["answer"].tolist())
    (expected,) = engine.infer([Query("topic", TEXTS[0])])
    assert isinstance(expected, Classification)
    np.testing.assert_allclose(topic["probs"], expected.probs, atol=1e-5)
    assert unknown["error"]["code"] == "not_found" and "entities" in tagged
    assert found["shared_layers"].shape == (3,)


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "code", "part"),
    [
        ({"model_name": "no-such"}, NOT_FOUND, "no-such"),
        ({"model_name": "topic", "model_version": "7"}, NOT_FOUND, "version 1 loaded"),
        ({"inputs": []}, INVALID, "expected text (and text_pair), or input_ids"),
        ({"inputs": [{**TEXT, "datatype": "FP32"}]}, INVALID, "text: expected datatype BYTES"),
        ({"inputs": [{**TEXT, "shape": [3]}]}, INVALID, "text: shape [3] needs 3 values, found 2"),
        ({"inputs": [{**TEXT, "shape": [10_000]}]}, INVALID, "the limit is 1024"),
        ({"inputs": [{**TEXT, "contents": {"bytes_contents": [b"\xff", b"a"]}}]}, INVALID, "expected UTF-8"),
        ({"inputs": [{**TEXT, "contents": {"int64_contents": [1]}}]}, INVALID, "contents.bytes_contents"),
        ({"raw_input_contents": [b"\x09\0\0\0abc"]}, INVALID, "found both"),
        ({"inputs": [{**TEXT, "contents": {}}], "raw_input_contents": [b"\x09\0\0\0abc"]}, INVALID, "text 0 ends"),
        ({"inputs": [{**TEXT, "contents": {}}], "raw_input_contents": [bytes(4)]}, INVALID, "needs 2 texts, found 1"),
        ({"inputs": [{**TEXT, "contents": {}}], "raw_input_contents": [bytes(400)]}, INVALID, "found 3 or more"),
        ({"inputs": [{**IDS, "contents": {}}], "raw_input_contents": [bytes(44)]}, INVALID, "needs 48 bytes, found 44"),
        ({"raw_input_contents": [b"", b""]}, INVALID, "one for each of 1 inputs, found 2"),
        ({"inputs": [{**IDS, "contents": {"int64_contents": [2, 9, 3, 2, 3, 800]}}]}, INVALID, "must lie in 0..799"),
        ({"outputs": [{"name": "embedding"}]}, INVALID, "['embedding']"),
        ({"parameters": {"temperature": {"double_param": 1.0}}}, INVALID, "temperature"),
        ({"parameters": {"truncate": {"int64_param": 1}}}, INVALID, "parameters.truncate"),
        ({"parameters": {"timeout": {"int64_param": 0}}}, INVALID, "parameters.timeout"),
        ({"parameters": {"prompt_name": {"int64_param": 1}}}, INVALID, "parameters.prompt_name"),
        ({"parameters": {"prompt_name": {"string_param": "query"}}}, INVALID, "there are no prompts"),
        ({"parameters": {"triton_enable_empty_final_response": {"bool_param": True}}}, INVALID, "triton_enable_empty"),
        ({"parameters": {"priority": {"uint64_param": 3}}}, INVALID, "parameters.priority"),
        ({"parameters": {"top_k": {"int64_param": 0}}}, INVALID, "parameters.top_k"),
        ({"parameters": {"aggregation": {"string_param": "most"}}}, INVALID, "parameters.aggregation"),
        ({"parameters": {"dimensions": {"int64_param": 2}}}, INVALID, "only vectors can be shortened"),
        ({"inputs": [{**TEXT, "parameters": {"shared_memory_region": {"string_param": "x"}}}]}, INVALID, "shared_mem"),
        ({"id": "x" * 2000}, INVALID, "at most 1024 characters"),
        ({"parameters": {"timeout": {"int64_param": 1}}}, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
        ({"model_name": "broken"}, grpc.StatusCode.INTERNAL, "NaN"),
    ],
)
def test_refusals(remote: Remote, fields: dict[str, Any], code: grpc.StatusCode, part: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        remote("ModelInfer", **{"model_name": "topic", "inputs": [TEXT], **fields})
    assert (refused.value.code(), part in refused.value.details()) == (code, True), refused.value.details()


def test_failures_are_in_the_log_by_the_number_that_the_client_is_told(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"model_name": "broken", "inputs": [TEXT]}
    with caplog.at_level(logging.WARNING), pytest.raises(grpc.RpcError) as alone:
        remote("ModelInfer", **asked)
    with caplog.at_level(logging.WARNING):
        (streamed,) = streaming(remote.channel)(iter([InferRequest(**asked)]), timeout=60)
    logged = [vars(record)["request_id"] for record in caplog.records if record.message == "failed"]
    assert len(set(logged)) == 2
    assert logged[0] in str(alone.value.details()) and logged[1] in streamed.error_message


def test_what_is_too_large_or_unknown_is_refused(remote: Remote) -> None:
    with pytest.raises(grpc.RpcError) as large:
        remote("ModelInfer", model_name="topic", inputs=[TEXT], raw_input_contents=[bytes(2 << 20)])
    assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as unknown:
        remote.channel.unary_unary(f"/{SERVICE}/ModelConfig")(b"", timeout=10)
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as garbage:
        remote.channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff" * 30, timeout=10)
    assert garbage.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert remote("ServerLive").live


def test_a_stream_answers_in_order_and_goes_on_after_an_error(remote: Remote) -> None:
    models = ["topic", "no-such", "names", "tiny-bert"] * 40
    asked = (InferRequest(model_name=name, id=str(at), inputs=[TEXT]) for at, name in enumerate(models))
    answers = list(streaming(remote.channel)(asked, timeout=60))
    assert [each.infer_response.id for each in answers] == [str(at) for at in range(len(models))]
    for name, each in zip(models, answers, strict=True):
        assert ("no-such" in each.error_message) == (name == "no-such")
        assert each.infer_response.model_name == ("" if name == "no-such" else name)
        assert each.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("field", ["inputs", "outputs", "raw_input_contents"])
def test_many_inputs_are_refused_before_they_are_read(remote: Remote, field: str) -> None:
    fields: dict[str, Any] = {field: [b"" if field.startswith("raw") else {}] * 100}
    with pytest.raises(grpc.RpcError) as refused:
        remote("ModelInfer", model_name="topic", **fields)
    assert refused.value.code() is INVALID and "at most 64, found 100" in refused.value.details()


@contextlib.contextmanager
def silent_streams(address: str, count: int) -> Iterator[list[Any]]:
    """Calls on which nothing is sent."""
    left = threading.Event()

    def nothing() -> Iterator[Any]:
        left.wait(60)
        yield from ()

    with contextlib.ExitStack() as closing:
        calls = []
        for _ in range(count):
            channel = closing.enter_context(grpc.insecure_channel(address))
            calls.append(streaming(channel)(nothing()))
        closing.callback(left.set)
        yield calls


def test_silent_streams_leave_places_for_others(address: str, remote: Remote) -> None:
    """32 of the 64 places are for streams of one tenant."""
    with silent_streams(address, 40) as calls:
        wait_until(lambda: sum(call.done() for call in calls) == 8)
        assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.UNAVAILABLE}
        assert remote("ServerLive").live


def test_a_silent_stream_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "SILENT", 0.2)
    with silent_streams(address, 1) as (call,):
        with pytest.raises(grpc.RpcError):  # of an end without one clients would not notice
            list(call)
        assert call.code() == grpc.StatusCode.UNAVAILABLE and "open a new stream" in call.details()


def test_a_client_that_leaves_a_stream_unread_breaks_nothing(
    remote: Remote, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        channel = grpc.insecure_channel(address)
        answers = streaming(channel)(InferRequest(model_name="names", inputs=[TEXT]) for _ in range(100))
        assert next(answers).infer_response.model_name == "names"
        channel.close()
    assert remote("ServerLive").live
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_calls_are_counted(remote: Remote, app: FastAPI) -> None:
    remote("ServerLive")
    with pytest.raises(grpc.RpcError):
        remote("ModelMetadata", name="no-such")
    text = app.state.context.metrics.render().decode()
    assert 'jpets_grpc_requests_total{code="OK",method="ServerLive"}' in text
    assert 'jpets_grpc_requests_total{code="NOT_FOUND",method="ModelMetadata"}' in text


def test_repository(remote: Remote, engine: Engine) -> None:
    found = {each.name: (each.version, each.state) for each in remote("RepositoryIndex", ready=True).models}
    assert found["topic"] == found["tiny-bert"] == ("1", "READY")
    remote("RepositoryModelUnload", model_name="topic")
    assert engine.tier("topic") != "device"
    remote("RepositoryModelLoad", model_name="topic")
    assert engine.tier("topic") == "device"
    remote("RepositoryModelUnload", model_name="topic")
    assert arrays(remote("ModelInfer", model_name="topic", inputs=[TEXT]))["label"].shape == (2,)
    for method, fields, code in (
        ("RepositoryModelLoad", {"model_name": "no-such"}, NOT_FOUND),
        ("RepositoryModelUnload", {"model_name": "no-such"}, NOT_FOUND),
        ("RepositoryModelUnload", {"model_name": "tiny-bert"}, INVALID),
        ("RepositoryModelLoad", {"model_name": "topic", "parameters": {"config": {"string_param": "{}"}}}, INVALID),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            remote(method, **fields)
        assert refused.value.code() is code


def test_an_answer_is_the_protocols_message() -> None:
    assert {field.name: field.number for field in InferResponse.DESCRIPTOR.fields} == {
        "model_name": 1,
        "model_version": 2,
        "id": 3,
        "parameters": 4,
        "outputs": 5,
        "raw_output_contents": 6,
    }
