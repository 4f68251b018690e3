"""/v2/embed and /v1/embed, as Cohere has them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from clients import Call

from checkpoints.task_file import task_to_bytes
from jpets.engine.engine import Engine
from jpets.types import Embedding, Preprocessing, Query, Task
from serving.protocols import embed
from serving.protocols.embeddings import encoded

PATHS = ("/v1/embed", "/v2/embed")
TEXTS = ["a chess engine", "soup"]
LONG = " ".join(f"the library reads file {number}" for number in range(60))


def vectors(engine: Engine, *queries: Query) -> np.ndarray:
    found = [own.embedding for own in engine.infer(queries) if isinstance(own, Embedding)]
    assert len(found) == len(queries)
    return np.array(found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["tiny-bert", "vectors"])
def test_texts_get_their_vectors_by_type(call: Call, engine: Engine, path: str, model: str) -> None:
    asked = {"model": model, "texts": TEXTS, "input_type": "search_document", "embedding_types": ["float", "base64"]}
    answer = call("POST", path, json=asked).json()
    queries = [Query(None if model == "tiny-bert" else model, text) for text in TEXTS]
    expected = vectors(engine, *queries)
    found = answer["embeddings"]
    assert set(found) == {"float", "base64"}
    np.testing.assert_allclose(found["float"], expected, atol=1e-5)
    for written, plain in zip(found["base64"], found["float"], strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(written), "<f4"), np.array(plain, np.float32))
    assert (answer["response_type"], answer["texts"]) == ("embeddings_by_type", TEXTS)
    assert answer["meta"]["api_version"] == {"version": path[2]}
    assert answer["meta"]["billed_units"] == {"input_tokens": sum(own.tokens for own in engine.infer(queries))}
    assert answer["id"] != call("POST", path, json=asked).json()["id"]


@pytest.mark.parametrize("path", PATHS)
def test_a_type_that_is_named_twice_is_written_once(call: Call, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    written: list[str] = []

    def noted(vector: Any, how: str) -> Any:
        written.append(how)
        return encoded(vector, how)

    monkeypatch.setattr(embed, "encoded", noted)
    answer = call("POST", path, json=OWN | {"embedding_types": ["base64", "float", "base64", "float"]}).json()
    assert list(answer["embeddings"]) == written == ["base64", "float"]


def test_without_types_the_earlier_shape_is_a_plain_list(call: Call, engine: Engine) -> None:
    asked = {"model": "vectors", "texts": TEXTS}
    expected = vectors(engine, *(Query("vectors", text) for text in TEXTS))
    earlier, later = (call("POST", path, json=asked).json() for path in PATHS)
    assert (earlier["response_type"], later["response_type"]) == ("embeddings_floats", "embeddings_by_type")
    np.testing.assert_allclose(earlier["embeddings"], expected, atol=1e-5)
    assert set(later["embeddings"]) == {"float"}
    np.testing.assert_allclose(later["embeddings"]["float"], expected, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_the_first_numbers_of_a_vector_keep_its_length(call: Call, engine: Engine, path: str) -> None:
    asked = {"model": "tiny-bert", "texts": TEXTS, "output_dimension": 8, "embedding_types": ["float"]}
    found = np.array(call("POST", path, json=asked).json()["embeddings"]["float"])
    whole = vectors(engine, *(Query(None, text) for text in TEXTS))
    scale = np.linalg.norm(whole, axis=1) / np.linalg.norm(whole[:, :8], axis=1)
    np.testing.assert_allclose(found, whole[:, :8] * scale[:, None], atol=1e-5)


@pytest.mark.parametrize(("truncate", "side"), [("START", "left"), ("END", "right"), (None, "right")])
def test_texts_that_are_too_long_are_cut_where_it_is_asked(
    call: Call, engine: Engine, truncate: str | None, side: Any
) -> None:
    """By default where the model's texts are cut."""
    asked = {"model": "vectors", "texts": [LONG, "soup"], "truncate": truncate}
    found = call("POST", "/v2/embed", json=asked).json()
    expected = vectors(engine, Query("vectors", LONG, truncate=side), Query("vectors", "soup"))
    np.testing.assert_allclose(found["embeddings"]["float"], expected, atol=1e-5)
    assert found["texts"] == [LONG, "soup"]


@pytest.mark.parametrize(("truncate", "kept"), [("START", slice(-5, None)), ("END", slice(5))])
def test_so_many_tokens_of_a_text_are_read(call: Call, engine: Engine, truncate: str, kept: slice) -> None:
    text = "the file for a library the for a"  # each word is one token
    asked = {"model": "vectors", "texts": [text, "the"], "truncate": truncate, "max_tokens": 5}
    found = call("POST", "/v2/embed", json=asked).json()
    words = text.split()
    assert len(engine.text.tokenizer.encode(text, add_special_tokens=False).ids) == len(words)
    expected = vectors(engine, Query("vectors", " ".join(words[kept])), Query("vectors", "the"))
    np.testing.assert_allclose(found["embeddings"]["float"], expected, atol=1e-5)


@pytest.fixture
def prompted(
    call: Call, make_task: Callable[..., Task], request: pytest.FixtureRequest
) -> Iterator[tuple[str, dict[str, str]]]:
    """A task with the prompts of the test, and these."""
    prompts: dict[str, str] = request.param
    task = make_task("prompted", type="embedding", seed=5, pooling="mean", normalize=True)
    rule = Preprocessing(prefix="usual: ", prompts=prompts)
    call("PUT", "/v1/tasks/prompted", content=task_to_bytes(dataclasses.replace(task, preprocessing=rule)))
    yield "prompted", prompts
    call("DELETE", "/v1/tasks/prompted")


@pytest.mark.parametrize(
    ("prompted", "use", "name"),
    [
        ({"query": "q: ", "passage": "p: "}, "search_query", "query"),
        ({"query": "q: ", "passage": "p: "}, "search_document", "passage"),
        ({"query": "q: ", "passage": "p: "}, "clustering", None),
        ({"query": "q: ", "passage": "p: "}, None, None),
        ({"document": "d: ", "passage": "p: "}, "search_document", "document"),
        ({"query": "q: "}, "search_document", None),
        ({"search_query": "s: ", "query": "q: ", "classification": "c: "}, "search_query", "search_query"),
        ({"search_query": "s: ", "query": "q: ", "classification": "c: "}, "classification", "classification"),
    ],
    indirect=["prompted"],
)
def test_a_use_chooses_the_models_prompt(
    call: Call, engine: Engine, prompted: tuple[str, dict[str, str]], use: str | None, name: str | None
) -> None:
    task, prompts = prompted
    found = call("POST", "/v2/embed", json={"model": task, "texts": TEXTS, "input_type": use}).json()
    before = "usual: " if name is None else prompts[name]
    expected = vectors(engine, *(Query("vectors", before + text) for text in TEXTS))
    np.testing.assert_allclose(found["embeddings"]["float"], expected, atol=1e-5)


OWN = {"model": "vectors", "texts": ["a"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("changes", "status", "part"),
    [
        ({"model": "none-such"}, 404, "none-such"),
        ({"model": "topic"}, 422, "/v1/classify"),
        ({"texts": []}, 422, "no inputs"),
        ({"texts": ["a", " "]}, 422, "input 1: the text is empty"),
        ({"texts": "a"}, 422, "texts"),
        ({"texts": ["a"] * 1025}, 413, "1025 inputs"),
        ({"images": ["data:image/png;base64,"]}, 422, "images"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, 422, "inputs"),
        ({"input_type": "image"}, 422, "input_type"),
        ({"embedding_types": ["float", "int8"]}, 422, "embedding_types.1"),
        ({"embedding_types": ["ubinary"]}, 422, "embedding_types.0"),
        ({"embedding_types": []}, 422, "embedding_types"),
        ({"embedding_types": ["float"] * 17}, 422, "embedding_types"),
        ({"truncate": "MIDDLE"}, 422, "truncate"),
        ({"output_dimension": 65}, 422, "output_dimension: 'vectors' gives 64"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"texts": [LONG], "truncate": "NONE"}, 422, "the limit is 64"),
        ({"texts": ["the library file"], "truncate": "NONE", "max_tokens": 2}, 422, "max_tokens: the text has"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    call: Call, path: str, changes: dict[str, Any], status: int, part: str
) -> None:
    answer = call("POST", path, json=OWN | changes)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert part in (error if path.startswith("/v2") else error["message"])


def test_options_that_are_null_are_left_out(call: Call) -> None:
    """As Cohere's clients send them."""
    nulls = dict.fromkeys(("images", "inputs", "input_type", "embedding_types", "truncate", "max_tokens", "priority"))
    plain, same = (call("POST", "/v2/embed", json=OWN | more).json() for more in ({}, nulls))
    assert same["embeddings"] == plain["embeddings"]
