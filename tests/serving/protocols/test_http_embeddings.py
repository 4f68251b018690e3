"""/v1/embeddings."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clients import Call

from jpets.engine.engine import Engine
from jpets.types import Embedding, Query
from serving.http.aside import SHORT, Aside
from serving.http.responses import FastJSONResponse

PATH = "/v1/embeddings"


def expected(engine: Engine, query: Query) -> np.ndarray:
    (result,) = engine.infer([query])
    assert isinstance(result, Embedding)
    return result.embedding


@pytest.mark.parametrize("model", ["tiny-bert", "vectors"])
def test_texts(call: Call, engine: Engine, model: str) -> None:
    answer = call("POST", PATH, json={"model": model, "input": ["hello", "a text"], "user": "me"}).json()
    task = None if model == "tiny-bert" else model
    assert (answer["object"], answer["model"]) == ("list", model)
    for index, text in enumerate(["hello", "a text"]):
        item = answer["data"][index]
        assert (item["object"], item["index"]) == ("embedding", index)
        np.testing.assert_allclose(item["embedding"], expected(engine, Query(task, text)), atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_base64_is_little_endian_f32(call: Call, engine: Engine) -> None:
    body = {"model": "tiny-bert", "input": "hello", "encoding_format": "base64"}
    (item,) = call("POST", PATH, json=body).json()["data"]
    vector = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected(engine, Query(None, "hello")), atol=1e-5)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_first_numbers_of_a_vector_keep_its_length(call: Call, engine: Engine, encoding: str) -> None:
    body = {"model": "tiny-bert", "input": "hello", "dimensions": 8, "encoding_format": encoding}
    (item,) = call("POST", PATH, json=body).json()["data"]
    found = item["embedding"]
    vector = np.frombuffer(base64.b64decode(found), "<f4") if encoding == "base64" else np.array(found)
    whole = expected(engine, Query(None, "hello"))
    first = whole[:8] * np.linalg.norm(whole) / np.linalg.norm(whole[:8])
    np.testing.assert_allclose(vector, first, atol=1e-5)


def test_numbers_are_written_with_all_their_bits() -> None:
    vector = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)[:, 3]
    written = FastJSONResponse({"embedding": np.ascontiguousarray(vector)}).body
    assert np.array(json.loads(bytes(written))["embedding"], np.float32).tobytes() == vector.tobytes()


def test_many_or_long_texts_are_prepared_in_another_thread(
    call: Call, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, submit = [], engine.submit

    def spy(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", spy)
    for given in ("hello", "hello " * SHORT, ["a"] * 100):
        answer = call("POST", PATH, json={"model": "tiny-bert", "input": given, "truncate": True})
        assert answer.status_code == 200
    loop, *others = threads
    assert len(others) == 2
    assert loop not in others


def test_many_numbers_are_written_in_another_thread(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    efforts, do = [], Aside.do

    async def spy(self: Aside, effort: int, work: Callable[[], Any]) -> Any:
        efforts.append(effort)
        return await do(self, effort, work)

    monkeypatch.setattr(Aside, "do", spy)
    for count, wide in ((1, False), (100, True)):
        efforts.clear()
        assert call("POST", PATH, json={"model": "tiny-bert", "input": ["a"] * count}).status_code == 200
        assert (efforts[-1] > SHORT) == wide


def test_token_ids_of_one_and_of_several_texts(call: Call, engine: Engine) -> None:
    ids = [2, 17, 30, 3]
    one = call("POST", PATH, json={"model": "tiny-bert", "input": ids}).json()["data"]
    two = call("POST", PATH, json={"model": "tiny-bert", "input": [ids, [2, 3]]}).json()["data"]
    assert (len(one), len(two)) == (1, 2)
    vector = expected(engine, Query(None, input_ids=ids))
    np.testing.assert_allclose(one[0]["embedding"], vector, atol=1e-5)
    np.testing.assert_allclose(two[0]["embedding"], vector, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"model": "no-such", "input": "a"}, 404, "no-such"),
        ({"model": "topic", "input": "a"}, 422, "/v1/classify"),
        ({"model": "tiny-bert", "input": []}, 422, "no inputs"),
        ({"model": "tiny-bert", "input": [[]]}, 422, "input_ids"),
        ({"model": "tiny-bert", "input": [2, 800]}, 422, "0..799"),
        ({"model": "tiny-bert", "input": [[2, 17, 3], [17, 30]]}, 422, "begin with 2, found 17"),
        ({"model": "vectors", "input": [17, 30]}, 422, "begin with 2, found 17"),
        ({"model": "tiny-bert", "input": [True]}, 422, "input"),
        ({"model": "tiny-bert", "input": "a", "dimensions": 65}, 422, "gives 64"),
        ({"model": "tiny-bert", "input": "a", "encoding_format": "int8"}, 422, "encoding_format"),
        ({"input": "a"}, 422, "model"),
    ],
)
def test_refusals(call: Call, body: object, status: int, part: str) -> None:
    answer = call("POST", PATH, json=body)
    assert answer.status_code == status
    assert part in answer.json()["error"]["message"]
