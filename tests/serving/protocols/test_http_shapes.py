"""Tasks whose vectors, scores or texts are of another kind than the backbone's: behind a layer of their own, ranked by
the output itself, behind virtual tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from clients import Call, client_of
from few_tasks import LONGEST, serving_few
from support import random_delta, tiny

from jpets.engine.engine import Engine
from jpets.engine.results.numbers import sigmoid
from jpets.types import Embedding, Head, Preprocessing, Query, Regression, Relevance, Task
from serving.hosted.repository import Validator
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.protocols.oip.tensors import Tensor

SIZE, WIDE, VIRTUAL = 24, 96, 8
RULE = Preprocessing(prefix="query: ", prompts={"passage": "a text: ", "none": ""})
RANKERS: dict[str, Relevance | None] = {"raw": "raw", "sigmoid": "sigmoid", "usual": None}
QUERY, TEXTS = "a board game", ["chess engine", "soup", "the library of go"]


def layer(outputs: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(0, 0.3, (tiny().config.hidden_size, outputs)).astype(np.float32)
    return {"kernel": kernel, "bias": rng.normal(0, 0.3, outputs).astype(np.float32)}


def ranker(name: str, relevance: Relevance | None) -> Task:
    head = Head("sequence-classification", layer(1, 3), problem="regression", relevance=relevance)
    return Task(name, tiny().ref(), (), head)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, validator: Validator) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("sentence")
    prompt = random_delta("prompt", tiny().config, seed=5, tokens=VIRTUAL)
    tasks = [
        Task("prompted", tiny().ref(), (prompt,), Head("sequence-classification", layer(3, 6)), ("a", "b", "c")),
        Task("short", tiny().ref(), (), Head("embedding", layer(SIZE, 1), pooling="mean", normalize=True), (), RULE),
        Task("wide", tiny().ref(), (), Head("embedding", layer(WIDE, 2), activation="identity")),
        *(ranker(name, how) for name, how in RANKERS.items()),
    ]
    with serving_few(folder, tasks, validator) as service:
        yield service


@pytest.fixture
def call(service: Service) -> Call:
    return client_of(service, ServingSettings())


@pytest.fixture
def engine(service: Service) -> Engine:
    assert isinstance(service.engine, Engine)
    return service.engine


def vectors_of(engine: Engine, task: str) -> np.ndarray:
    found = engine.infer([Query(task, text) for text in TEXTS])
    return np.stack([own.embedding for own in found if isinstance(own, Embedding)])


@pytest.mark.parametrize(("task", "size"), [("short", SIZE), ("wide", WIDE)])
def test_vectors_have_the_size_of_their_layer(call: Call, engine: Engine, task: str, size: int) -> None:
    expected = vectors_of(engine, task)
    assert expected.shape == (len(TEXTS), size)
    answer = call("POST", "/v1/embeddings", json={"model": task, "input": TEXTS}).json()
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-5)
    metadata = call("GET", f"/v2/models/{task}").json()
    assert metadata["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, size]}]
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]
    (output,) = call("POST", f"/v2/models/{task}/infer", json={"inputs": inputs}).json()["outputs"]
    assert output["shape"] == [len(TEXTS), size]
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), expected, atol=1e-5)
    found = call("POST", f"/hf/{task}", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    pooled = call("POST", f"/tei/{task}/embed", json={"inputs": TEXTS}).json()
    unit = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(pooled, unit, atol=1e-5)


@pytest.mark.parametrize("path", ["/tei/{}/embed", "/hf/{}"])
def test_vectors_that_have_the_length_1_keep_no_other(call: Call, path: str) -> None:
    """The plain backbone's have, as its checkpoint says nothing else."""
    for model, status in (("tiny-bert", 422), ("short", 422), ("wide", 200)):
        answer = call("POST", path.format(model), json={"inputs": "a", "normalize": False})
        assert answer.status_code == status, model
        assert status == 200 or "have the length 1" in answer.json()["error"]["message"]
    assert call("GET", "/tei/tiny-bert/info").json()["model_type"] == {"embedding": {"pooling": "mean"}}


def test_a_vector_has_no_more_numbers_than_its_layer(call: Call) -> None:
    for size, status in ((SIZE, 200), (SIZE + 1, 422)):
        answer = call("POST", "/v1/embeddings", json={"model": "short", "input": "a", "dimensions": size})
        assert answer.status_code == status
    assert f"'short' gives {SIZE}, found {SIZE + 1}" in answer.json()["error"]["message"]
    for size, status in ((SIZE, 200), (SIZE + 1, 422)):
        for path in ("/hf/short", "/tei/short/embed"):
            assert call("POST", path, json={"inputs": "a", "dimensions": size}).status_code == status
    (whole,) = call("POST", "/hf/short", json={"inputs": "a"}).json()
    for path in ("/hf/short", "/tei/short/embed"):
        (first,) = call("POST", path, json={"inputs": "a", "dimensions": 8}).json()
        np.testing.assert_allclose(first, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)
    wide = call("POST", "/v1/embeddings", json={"model": "wide", "input": "a", "dimensions": WIDE})
    assert len(wide.json()["data"][0]["embedding"]) == WIDE


def test_pairs_are_ranked_by_what_the_model_says(call: Call, engine: Engine) -> None:
    results = engine.infer([Query("raw", QUERY, text) for text in TEXTS])
    logits = np.array([own.logits[0] for own in results if isinstance(own, Regression)])
    order = np.argsort(-logits).tolist()
    for task, scores in (("raw", logits), ("sigmoid", sigmoid(logits)), ("usual", sigmoid(logits))):
        answer = call("POST", "/v1/rerank", json={"model": task, "query": QUERY, "documents": TEXTS}).json()
        assert [each["index"] for each in answer["results"]] == order
        found = [each["relevance_score"] for each in answer["results"]]
        np.testing.assert_allclose(found, scores[order], atol=1e-5)
        answer = call("POST", "/v1/score", json={"model": task, "text_1": QUERY, "text_2": TEXTS}).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], scores, atol=1e-5)
        for raw, own in ((True, logits), (False, sigmoid(logits))):
            asked = {"query": QUERY, "texts": TEXTS, "raw_scores": raw}
            found = call("POST", f"/tei/{task}/rerank", json=asked).json()
            np.testing.assert_allclose([each["score"] for each in found], own[order], atol=1e-5)


@pytest.mark.parametrize("task", RANKERS)
def test_a_task_gives_one_score_over_every_route(call: Call, engine: Engine, task: str) -> None:
    """That of Hugging Face's client: the sigmoid where the only output is said to stand for it, else the output."""
    results = [own for own in engine.infer([Query(task, text) for text in TEXTS]) if isinstance(own, Regression)]
    logits = np.array([own.logits[0] for own in results])
    scores = sigmoid(logits) if task == "sigmoid" else logits
    np.testing.assert_allclose([own.score for own in results], scores, atol=1e-5)
    listed = call("POST", f"/hf/{task}", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose([each[0]["score"] for each in listed], scores, atol=1e-5)
    classified = call("POST", "/v1/classify", json={"model": task, "input": TEXTS}).json()["data"]
    np.testing.assert_allclose([each["values"] for each in classified], logits[:, None], atol=1e-5)
    np.testing.assert_allclose([each["probs"] for each in classified], scores[:, None], atol=1e-5)
    assert {each["num_classes"] for each in classified} == {1}
    if task == "sigmoid":
        np.testing.assert_allclose([each["score"] for each in classified], scores, atol=1e-5)
    assert {each["label"] for each in classified} == {listed[0][0]["label"] if task == "sigmoid" else None}
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]
    outputs = call("POST", f"/v2/models/{task}/infer", json={"inputs": inputs}).json()["outputs"]
    found = {each["name"]: each["data"] for each in outputs}
    np.testing.assert_allclose(found["score"], scores, atol=1e-5)
    np.testing.assert_allclose(found["logits"], logits, atol=1e-5)
    for activated, expected in ((None, scores), (True, scores), (False, logits)):
        asked = {"model": task, "input": TEXTS, "use_activation": activated}
        pooled = call("POST", "/pooling", json=asked).json()["data"]
        np.testing.assert_allclose([each["data"] for each in pooled], expected[:, None], atol=1e-5)


def test_a_score_of_windows_is_that_of_their_mean_value(call: Call) -> None:
    asked = {"model": "sigmoid", "input": "a chess engine in the library of functions " * 12, "windows": True}
    (found,) = call("POST", "/v1/classify", json=asked).json()["data"]
    assert found["score"] == pytest.approx(float(sigmoid(np.array(found["values"]))[0]), abs=1e-5)
    assert found["probs"] == [found["score"]]


def test_a_prompt_is_named_with_a_request(call: Call, engine: Engine) -> None:
    """In the field of text-embeddings-inference and of Hugging Face's client."""
    for prompt in (None, "passage", "none"):
        (found,) = engine.infer([Query("short", TEXTS[0], prompt=prompt)])
        assert isinstance(found, Embedding)
        told = {} if prompt is None else {"prompt_name": prompt}
        answer = call("POST", "/v1/embeddings", json={"model": "short", "input": TEXTS[0], **told}).json()
        np.testing.assert_allclose(answer["data"][0]["embedding"], found.embedding, atol=1e-5)
        for path in ("/tei/short/embed", "/hf/short"):
            (vector,) = call("POST", path, json={"inputs": TEXTS[0], **told}).json()
            np.testing.assert_allclose(vector, found.embedding, atol=1e-5)
        each = engine.infer([Query("short", text, prompt=prompt) for text in TEXTS])
        first, *others = (own.embedding / np.linalg.norm(own.embedding) for own in each if isinstance(own, Embedding))
        alike = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}, **told}
        found_alike = call("POST", "/hf/short", json=alike).json()
        np.testing.assert_allclose(found_alike, np.stack(others) @ first, atol=1e-4)
        item = {"model": "short", "text": TEXTS[0], **told}
        (mixed,) = call("POST", "/v1/classify", json={"inputs": [item]}).json()["data"]
        np.testing.assert_allclose(mixed["embedding"], found.embedding, atol=1e-5)
        text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXTS[0]]}
        body = {"inputs": [text], "outputs": [{"name": "embedding"}], "parameters": told}
        (output,) = call("POST", "/v2/models/short/infer", json=body).json()["outputs"]
        np.testing.assert_allclose(output["data"], found.embedding, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {"model": "short", "input": "a"}, "one of ['none', 'passage'], found 'query'"),
        ("/v1/embeddings", {"model": "short", "input": [[2, 5, 3]]}, "none beside token ids"),
        ("/v1/embeddings", {"model": "tiny-bert", "input": "a"}, "none, as there are no prompts"),
        ("/tei/wide/embed", {"inputs": "a"}, "none, as there are no prompts"),
        ("/hf/raw", {"inputs": "a"}, "parameters.prompt_name: text_classification takes"),
    ],
)
def test_an_unknown_prompt_is_refused(call: Call, path: str, body: dict[str, object], named: str) -> None:
    answer = call("POST", path, json={**body, "prompt_name": "query"})
    assert answer.status_code == 422
    assert named in answer.json()["error"]["message"]


def test_windows_leave_room_for_virtual_tokens(call: Call) -> None:
    text = "a chess engine in the library of functions " * 12
    asked = {"model": "prompted", "input": text, "windows": True}
    answer = call("POST", "/v1/classify", json=asked)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["data"]
    assert "error" not in found and sum(found["probs"]) == pytest.approx(1, abs=1e-3)
    assert call("GET", "/tei/prompted/info").json()["max_input_length"] == LONGEST - VIRTUAL
    assert call("GET", "/tei/short/info").json()["max_input_length"] == LONGEST


def test_a_backbone_says_where_it_cuts_texts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its Sentence-Transformers folder has it."""
    assert service.longest(None) == LONGEST
    embeds = SimpleNamespace(preprocessing=Preprocessing(max_length=7))
    monkeypatch.setattr(service, "backbone", SimpleNamespace(embeds=embeds))
    assert service.longest(None) == 7


def test_nested_values_are_counted() -> None:
    """Many are read beside the event loop."""
    assert Tensor("input_ids", "INT64", [3, 500], [[1] * 500] * 3).values == 1500
    assert Tensor("text", "BYTES", [2], ["a", "b"]).values == 2
    assert Tensor("text", "BYTES", [-1, 4], ["a", "b"]).values == 2
    assert Tensor("text", "BYTES", [2**63 - 1] * 100_000, []).values == 0, "their product would take minutes"
