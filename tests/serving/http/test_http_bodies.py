"""Bodies that are not plain JSON, hold too much, or numbers that are too large: each is refused with its name."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from clients import Call, client_of
from faults.hostile_bodies import attack
from listening import listening

from serving.app import create_app
from serving.hosted.service import Service
from serving.http.body_budget import FREE, Body, BodyBudget, NoRoom
from serving.http.responses import FastJSONResponse
from serving.http.settings import ServingSettings

CLASSIFY, EMBED, INFER, ROLLBACK = (
    "/v1/classify",
    "/v1/embeddings",
    "/v2/models/topic/infer",
    "/v1/tasks/topic/rollback",
)
ASKED = json.dumps({"model": "topic", "input": "hello"}).encode()
HUGE = "9" * 400
JSON = "application/json"


def told(call: Call, path: str, content: bytes, **headers: str) -> tuple[int, str]:
    """The status and the message."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = call("POST", path, content=content, headers=named)
    error = answer.json().get("error", "")
    return answer.status_code, error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("GZIP", gzip.compress),
    ],
)
def test_packed_bodies_are_read(call: Call, encoding: str, pack: Any) -> None:
    assert told(call, CLASSIFY, pack(ASKED), content_encoding=encoding, content_type=JSON) == (200, "")


def test_packed_bodies_count_as_what_they_unpack_to(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def count(body: Body, size: int) -> None:
        sizes.append(size)
        if len(sizes) > 1:
            raise NoRoom

    monkeypatch.setattr(Body, "unpacked", count)
    packed = gzip.compress(ASKED)
    assert told(call, CLASSIFY, packed, content_encoding="gzip", content_type=JSON) == (200, "")
    status, message = told(call, CLASSIFY, packed, content_encoding="gzip", content_type=JSON)
    assert status == 503 and "memory" in message
    assert told(call, CLASSIFY, ASKED, content_type=JSON) == (200, "")
    assert sizes == [len(ASKED)] * 2


def test_unpacked_bytes_are_counted_until_the_answer() -> None:
    async def run() -> None:
        budget = BodyBudget(1 << 20)
        with budget.body(Mock()) as one:
            one.unpacked(FREE + (1 << 19))
            with budget.body(Mock()) as other, pytest.raises(NoRoom):
                other.unpacked(FREE + (1 << 19) + 1)
            assert budget.held == 1 << 19
        assert budget.held == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "encoding", "status", "part"),
    [
        (ASKED, "br", 415, "Content-Encoding: gzip, deflate or none, found br"),
        (gzip.compress(gzip.compress(ASKED, mtime=0), mtime=0), "gzip, gzip", 415, "Content-Encoding"),
        (ASKED, "gzip", 400, "not valid gzip"),
        (gzip.compress(ASKED, mtime=0)[:-4], "gzip", 400, "ends early"),
        (gzip.compress(ASKED, mtime=0) * 2, "gzip", 400, "behind its end"),
        (gzip.compress(b" " * (50 << 20), mtime=0), "gzip", 413, "unpacked"),
        (zlib.compress(b" " * (50 << 20)), "deflate", 413, "unpacked"),
    ],
)
def test_other_encodings_and_bombs_are_refused(
    call: Call, content: bytes, encoding: str, status: int, part: str
) -> None:
    found, message = told(call, CLASSIFY, content, content_encoding=encoding, content_type=JSON)
    assert found == status and part in message


@pytest.mark.parametrize(
    "given",
    [
        "",
        JSON,
        "application/json; charset=utf-8",
        "Application/JSON;charset=UTF-8",
        "text/json",
        "application/x-json",
        "application/vnd.api+json",
    ],
)
@pytest.mark.parametrize("path", [CLASSIFY, INFER])
def test_content_types_that_are_json(call: Call, path: str, given: str) -> None:
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
    content = ASKED if path == CLASSIFY else json.dumps(body).encode()
    assert told(call, path, content, content_type=given) == (200, "")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("application/x-www-form-urlencoded", "found application/x-www-form-urlencoded"),
        ("multipart/form-data; boundary=x", "found multipart/form-data"),
        ("text/plain;charset=UTF-8", "found text/plain"),
        ("application/octet-stream", "found application/octet-stream"),
        ("application/json; charset=utf-16", "found charset utf-16"),
        ('application/json; a="' + ";" * 60_000, "found application/json"),
        ("application/json; charset*=a; charset*0=b", "found application/json"),
        (f"application/json; charset*{'9' * 200}*=x", ""),
    ],
)
@pytest.mark.parametrize("path", [CLASSIFY, INFER, ROLLBACK])
def test_other_content_types_are_named(call: Call, path: str, given: str, part: str) -> None:
    status, message = told(call, path, ASKED, content_type=given)
    assert status == 415 and "expected Content-Type: application/json" in message and part in message


def test_files_come_as_they_are(call: Call) -> None:
    packed = call("PUT", "/v1/tasks/new", content=b"a", headers={"content-encoding": "gzip"})
    form = call("PUT", "/v1/tasks/new", files={"file": b"a"})
    assert (packed.status_code, form.status_code) == (415, 415)
    assert "Content-Encoding" in packed.text and "--data-binary" in form.text


def test_binary_tensors_behind_the_json(call: Call) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    head = json.dumps({"inputs": [tensor]}).encode()
    length = str(len(head))
    for content_type in (JSON, "application/octet-stream"):
        how = {"inference_header_content_length": length, "content_type": content_type}
        assert told(call, INFER, head + b"\1\0\0\0a", **how)[0] == 200
    status, message = told(call, INFER, head)
    assert status == 422 and "expected 5 bytes behind the JSON, found 0" in message


def test_what_triton_s_clients_send_for_nothing_said(call: Call) -> None:
    parameters = {
        "binary_data_output": False,
        "priority": 0,
        "sequence_id": 0,
        "sequence_start": False,
        "timeout": None,
    }
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"], "parameters": {"binary_data": False}}
    outputs = [{"name": "label", "parameters": {"binary_data": False, "classification": 0}}]
    body = {"inputs": [tensor], "outputs": outputs, "parameters": parameters}
    assert call("POST", INFER, json=body).status_code == 200
    assert call("POST", INFER, json={"inputs": [tensor], "outputs": None, "parameters": None}).status_code == 200
    body["parameters"] = {"priority": 1}
    assert "parameters.priority" in call("POST", INFER, json=body).json()["error"]
    double = call("POST", INFER, json={"inputs": [tensor], "outputs": [{"name": "label"}] * 3})
    assert (double.status_code, "each name once" in double.text) == (422, True)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "the body is empty"),
        (b'{"model": "topic", "input": "a"', "not valid JSON: EOF"),
        (b"model=topic", "not valid JSON"),
        (b'{"model": "topic", "input": "\xff"}', "not in UTF-8"),
        ('{"model": "topic", "input": "a"}'.encode("utf-16"), "not in UTF-8"),
        (b'{"model": "topic", "input": NaN', "not valid JSON"),
    ],
)
def test_what_is_no_json_says_what_is_wrong(call: Call, content: bytes, part: str) -> None:
    status, message = told(call, CLASSIFY, content, content_type=JSON)
    assert status == 400 and part in message


def test_a_byte_order_mark_is_passed_over(call: Call) -> None:
    assert told(call, CLASSIFY, b"\xef\xbb\xbf" + ASKED) == (200, "")


@pytest.mark.parametrize("number", [HUGE, "-" + HUGE, str(1 << 63), "1e999"])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CLASSIFY, '{"model": "topic", "input": "a", "top_k": %s}', "top_k"),
        (CLASSIFY, '{"model": "topic", "input": %s}', "input"),
        (EMBED, '{"model": "tiny-bert", "input": "a", "dimensions": %s}', "dimensions"),
        (EMBED, '{"model": "tiny-bert", "input": [3, %s]}', "input"),
        (EMBED, '{"model": "tiny-bert", "input": [[3], [3, %s]]}', "input"),
        (INFER, '{"inputs": [{"name": "text", "shape": [%s], "datatype": "BYTES", "data": ["a"]}]}', "shape"),
        (INFER, '{"inputs": [{"name": "input_ids", "shape": [1, 1], "datatype": "INT64", "data": [%s]}]}', "input_ids"),
        (INFER, '{"inputs": [], "parameters": {"timeout": %s}}', "timeout"),
        (INFER, '{"inputs": [], "parameters": {"priority": %s}}', "priority"),
        ("/hf/questions", '{"inputs": {"question": "a", "context": "b"}, "parameters": {"top_k": %s}}', "top_k"),
        (ROLLBACK, '{"version": %s}', "version"),
    ],
)
def test_numbers_beyond_64_bits_in_bodies(call: Call, path: str, body: str, field: str, number: str) -> None:
    content = (body % number).encode()
    status, message = told(call, path, content)
    assert status == 422 and field in message and len(message) < 500
    if len(number) >= 64:  # in a body that is long enough to be checked first
        status, message = told(call, path, content + b" " * 5000)
        assert status == 400 and "number of 64 digits" in message


@pytest.mark.parametrize("number", [HUGE, str(1 << 63), "9" * 5000])
def test_numbers_beyond_64_bits_elsewhere(call: Call, number: str) -> None:
    for path in ("/v1/tasks", "/v1/tasks/topic", "/v1/tasks/topic/file"):
        answer = call("GET", path, params={"limit" if path == "/v1/tasks" else "version": number})
        assert answer.status_code == 422, path
    for name, value in {"x-request-timeout": number, "content-length": number}.items():
        answer = call("POST", CLASSIFY, content=ASKED, headers={name: value, "content-type": JSON})
        assert answer.status_code in (413, 422), name
    assert call("PUT", "/v1/tasks/new", content=b"a", headers={"content-length": number}).status_code == 413
    assert call("DELETE", "/v1/tasks/topic", headers={"if-match": number}).status_code == 422
    assert call("GET", f"/v2/models/topic/versions/{number}").status_code == 404


@pytest.mark.parametrize("given", ["1_0", "٣", "0x1", "infinity", "1e400", ""])
def test_timeouts_that_are_no_plain_number(call: Call, given: str) -> None:
    answer = call(
        "POST", CLASSIFY, json={"model": "topic", "input": "a"}, headers={"x-request-timeout": given.encode()}
    )
    assert answer.status_code == 422


def test_the_first_problems_are_told_and_not_each_of_many(call: Call) -> None:
    for path, body in (
        (CLASSIFY, {"model": "topic", "input": [1] * 5000}),
        (EMBED, {"model": "tiny-bert", "input": [[0.5] * 5000]}),
        (INFER, {"inputs": [1] * 5000}),
        (INFER, {"inputs": [{"name": "text", "shape": ["a"] * 5000, "datatype": "BYTES", "data": []}]}),
        (CLASSIFY, {f"field-{number}": 1 for number in range(2000)}),
    ):
        status, message = told(call, path, json.dumps(body).encode())
        assert status == 422 and len(message) < 600


def test_names_of_fields_that_are_no_unicode(call: Call) -> None:
    assert told(call, CLASSIFY, b'{"\\ud800": 1}')[0] == 422
    assert told(call, INFER, b'{"inputs": [{"name": "\\ud800"}]}')[0] == 422


def test_hostile_bodies_are_answered_while_the_server_lives(service: Service) -> None:
    """The kinds that ``scripts/faults/hostile_bodies.py`` sends to a server of its own, here small."""
    size = 1 << 15
    small = ServingSettings(max_body_bytes=size + (1 << 14), max_inputs=128)
    with listening(create_app(service, small)) as url:
        outcomes = list(attack(url, "topic", "tiny-bert", size, lambda: 0, settle=0))
    assert len(outcomes) > 100
    assert [each.name for each in outcomes if not each.within(health=60, added=0)] == []
    assert {each.status for each in outcomes} <= {200, 400, 404, 413, 415, 422, 504}


def test_a_body_over_the_limit_needs_no_reading(service: Service) -> None:
    call = client_of(service, ServingSettings(max_body_bytes=1000))
    assert told(call, CLASSIFY, b" " * 1001)[0] == 413


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"data": []},
        {
            "data": [{"index": 0, "vector": np.arange(3, dtype=np.float32)}, {"index": 1, "é": [[1.5], {}]}],
            "model": None,
        },
        {"outputs": [{"shape": [70_000], "data": np.linspace(0, 1, 70_000, dtype=np.float32)}]},
        {"outputs": [{"data": ["a", '"'] * 40_000}]},
        {"embeddings": {"float": [np.arange(3, dtype=np.float32)] * 2, "base64": ["AAAA"]}, "texts": ["a", "b"]},
        [np.arange(20_000, dtype=np.float32), np.zeros(0, np.float32)],
    ],
)
def test_pieces_are_what_is_written_at_once(content: Any) -> None:
    whole, pieces = FastJSONResponse(content), FastJSONResponse.in_pieces(content)
    assert whole.body == pieces.body
    assert whole.headers == pieces.headers
