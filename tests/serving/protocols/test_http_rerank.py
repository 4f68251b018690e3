"""Pairs of texts in the shapes of Cohere, Jina, vLLM and text-embeddings-inference, beside the engine's answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from clients import Call, client_of
from support import tiny
from tokenizers import Tokenizer

from checkpoints.task_file import task_to_bytes
from jpets.engine.engine import Engine
from jpets.engine.results.numbers import sigmoid
from jpets.tokenizing import TextEncoder
from jpets.types import Classification, Embedding, Preprocessing, Query, Regression, Task, Tokens
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.protocols.relevance import best_first
from serving.protocols.token_limits import cut

QUERY, TEXTS = "a board game", ["chess engine", "soup", "the library of go"]


@pytest.fixture(scope="module")
def logits(engine: Engine) -> np.ndarray:
    """Of each pair, by the task ``price``, which has one output."""
    found = [
        own for own in engine.infer([Query("price", QUERY, text) for text in TEXTS]) if isinstance(own, Regression)
    ]
    assert len(found) == len(TEXTS)
    return np.array([own.logits[0] for own in found])


def test_texts_are_ranked_by_a_query(call: Call, logits: np.ndarray) -> None:
    order = np.argsort(-logits).tolist()
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        asked = {"model": "price", "query": QUERY, "documents": TEXTS}
        answer = call("POST", path, json=asked).json()
        assert [each["index"] for each in answer["results"]] == order
        found = [each["relevance_score"] for each in answer["results"]]
        np.testing.assert_allclose(found, sigmoid(logits[order]), rtol=1e-3)
        assert answer["usage"]["total_tokens"] > 0 and "document" not in answer["results"][0]
        best = {**asked, "top_n": 1, "return_documents": True, "documents": [{"text": text} for text in TEXTS]}
        (only,) = call("POST", path, json=best).json()["results"]
        assert only["index"] == order[0] and only["document"] == {"text": TEXTS[order[0]]}


def test_documents_are_read_up_to_so_many_tokens(call: Call, engine: Engine) -> None:
    """And repeated whole. All of the first one would be too much for the task."""
    long, most = "chess engine of the library " * 30, 7
    asked = {"model": "price", "query": QUERY, "documents": [long, "soup"], "return_documents": True}
    assert call("POST", "/v2/rerank", json=asked).status_code == 422
    tokenizer = engine.text.tokenizer
    query, own = (tokenizer.encode(text, add_special_tokens=False) for text in (QUERY, long))
    own.truncate(most)
    pair = tokenizer.post_process(query, own, True)
    results = engine.infer(
        [Query("price", input_ids=pair.ids, token_type_ids=pair.type_ids), Query("price", QUERY, "soup")]
    )
    expected = [float(sigmoid(each.logits)[0]) for each in results if isinstance(each, Regression)]
    answer = call("POST", "/v2/rerank", json=asked | {"max_tokens_per_doc": most}).json()
    found = {each["index"]: each for each in answer["results"]}
    assert [found[at]["relevance_score"] for at in (0, 1)] == pytest.approx(expected, rel=1e-3)
    assert found[0]["document"]["text"] == long
    for wrong in (0, "7"):
        refused = call("POST", "/v2/rerank", json=asked | {"max_tokens_per_doc": wrong})
        assert refused.status_code == 422 and "max_tokens_per_doc" in refused.text


def test_documents_alone_are_cut_where_a_task_wants_that(
    call: Call, engine: Engine, make_task: Callable[..., Task]
) -> None:
    """Its query stays whole, and is refused where it leaves them no room."""
    rule = Preprocessing(truncation=True, truncation_strategy="only_second")
    task = make_task("ranker", outputs=1, seed=3, problem="regression")
    call("PUT", "/v1/tasks/ranker", content=task_to_bytes(dataclasses.replace(task, preprocessing=rule)))
    question, document = "a board game of the library " * 6, "chess engine " * 60
    own = Tokenizer.from_str(tiny().tokenizer_json)
    own.enable_truncation(engine.longest, strategy="only_second")
    pair = own.encode(question, document)
    assert pair.sequence_ids.count(0) > engine.longest // 2  # of which longest-first would leave no more
    (result,) = engine.infer([Query("price", input_ids=pair.ids, token_type_ids=pair.type_ids)])
    assert isinstance(result, Regression)
    asked = {"model": "ranker", "query": question, "documents": [document]}
    (found,) = call("POST", "/v2/rerank", json=asked).json()["results"]
    assert found["relevance_score"] == pytest.approx(float(sigmoid(result.logits)[0]), rel=1e-3)
    refused = call("POST", "/v1/rerank", json=asked | {"query": question * 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "input_too_long")
    assert "only_second" in refused.json()["error"]["message"]
    call("DELETE", "/v1/tasks/ranker")


@pytest.mark.parametrize("side", ["Left", "Right"])
@pytest.mark.parametrize("most", [1, 5, 40, 100])
def test_a_text_is_cut_where_its_model_cuts_texts(side: str, most: int) -> None:
    """A hundred tokens are more than the model takes."""
    document = json.loads(tiny().tokenizer_json)
    document["truncation"] = {"direction": side, "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    encoder = TextEncoder(json.dumps(document), 800, 2, 64)
    text = " the library for a " * 40

    def ids(part: str) -> list[int]:
        found: list[int] = encoder.tokenizer.encode(part, add_special_tokens=False).ids
        return found

    whole = ids(text)
    kept = whole if most == 100 else whole[-most:] if side == "Left" else whole[:most]
    assert ids(cut(encoder, text, most)) == kept
    assert cut(encoder, " a\u200b ", 5) == " a\u200b "


def test_pairs_are_scored(call: Call, logits: np.ndarray) -> None:
    for path in ("/v1/score", "/score"):
        for first in (QUERY, [QUERY], [QUERY] * len(TEXTS)):
            answer = call("POST", path, json={"model": "price", "text_1": first, "text_2": TEXTS}).json()
            assert [each["index"] for each in answer["data"]] == [0, 1, 2]
            np.testing.assert_allclose([each["score"] for each in answer["data"]], sigmoid(logits), rtol=1e-3)
    answer = call("POST", "/score", json={"model": "price", "text_1": QUERY, "text_2": TEXTS[0]}).json()
    assert len(answer["data"]) == 1


@pytest.mark.parametrize(("one", "other"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_vllms_names_of_both_sides_are_known(call: Call, logits: np.ndarray, one: str, other: str) -> None:
    answer = call("POST", "/score", json={"model": "price", one: QUERY, other: TEXTS, "user": "me"}).json()
    np.testing.assert_allclose([each["score"] for each in answer["data"]], sigmoid(logits), rtol=1e-3)
    both = call("POST", "/score", json={"model": "price", one: QUERY, other: TEXTS, "text_1": QUERY})
    assert both.status_code == 422 and one in both.text


def test_an_unknown_option_may_be_null(call: Call) -> None:
    """Clients of Cohere send one for what their caller left out, and newer clients know more options."""
    asked = {"model": "price", "query": QUERY, "documents": TEXTS}
    plain = call("POST", "/v2/rerank", json=asked).json()["results"]
    nulls = {"priority": None, "user": None, "top_n": None, "later": None}
    assert call("POST", "/v2/rerank", json=asked | nulls).json()["results"] == plain
    for wrong in ({"later": False}, {"documents": [{"text": "a", "later": None}]}):
        refused = call("POST", "/v2/rerank", json=asked | nulls | wrong)
        assert refused.status_code == 422 and "later" in refused.text
    for path, body in (
        ("/v1/classify", {"model": "price", "input": QUERY}),
        ("/v1/embeddings", {"model": "vectors", "input": QUERY}),
        ("/tei/vectors/embed", {"inputs": QUERY}),
        ("/hf/topic", {"inputs": QUERY}),
    ):
        assert call("POST", path, json=body | {"later": None}).status_code == 200, path


def test_an_option_with_a_default_may_be_null(call: Call) -> None:
    pair = {"query": QUERY, "texts": TEXTS}
    for path, body in (
        ("/tei/price/rerank", {**pair, "raw_scores": None, "return_text": None, "later": None}),
        ("/tei/price/predict", {"inputs": [QUERY, TEXTS[0]], "raw_scores": None}),
        ("/v2/repository/index", {"ready": None}),
    ):
        answer = call("POST", path, json=body)
        plain = {name: value for name, value in body.items() if value is not None}
        assert answer.status_code == 200 and answer.json() == call("POST", path, json=plain).json(), path
    for wrong in ({**pair, "query": None}, {**pair, "query": None, "return_text": None}, {**pair, "texts": None}):
        refused = call("POST", "/tei/price/rerank", json=wrong)
        assert refused.status_code == 422 and ("query" in refused.text) != ("texts" in refused.text)


def test_the_routes_of_text_embeddings_inference(call: Call, engine: Engine, logits: np.ndarray) -> None:
    order = np.argsort(-logits).tolist()
    asked = {"query": QUERY, "texts": TEXTS}
    found = call("POST", "/tei/price/rerank", json=asked).json()
    assert [each["index"] for each in found] == order
    np.testing.assert_allclose([each["score"] for each in found], sigmoid(logits[order]), rtol=1e-3)
    raw = call("POST", "/tei/price/rerank", json={**asked, "raw_scores": True, "return_text": True}).json()
    np.testing.assert_allclose([each["score"] for each in raw], logits[order], rtol=1e-3)
    assert [each["text"] for each in raw] == [TEXTS[at] for at in order]

    topic, pair = engine.infer([Query("topic", QUERY), Query("topic", QUERY, TEXTS[0])])
    assert isinstance(topic, Classification) and isinstance(pair, Classification)
    for inputs, expected in ((QUERY, topic), ([QUERY, TEXTS[0]], pair)):
        classes = call("POST", "/tei/topic/predict", json={"inputs": inputs}).json()
        best = np.argsort(-expected.probs)
        assert [each["label"] for each in classes] == [expected.names[at] for at in best]
        np.testing.assert_allclose([each["score"] for each in classes], expected.probs[best], rtol=1e-3)
    both = call("POST", "/tei/topic/predict", json={"inputs": [[QUERY], [QUERY, TEXTS[0]]], "raw_scores": True}).json()
    for classes, result in zip(both, (topic, pair), strict=True):
        np.testing.assert_allclose([each["score"] for each in classes], np.sort(result.logits)[::-1], rtol=1e-3)

    (plain,) = engine.infer([Query(None, QUERY)])
    assert isinstance(plain, Embedding)
    (vector,) = call("POST", "/tei/tiny-bert/embed", json={"inputs": QUERY}).json()
    np.testing.assert_allclose(vector, plain.embedding / np.linalg.norm(plain.embedding), atol=1e-5)
    assert len(call("POST", "/tei/vectors/embed", json={"inputs": TEXTS}).json()) == len(TEXTS)
    for task, kind in (
        ("price", "reranker"),
        ("topic", "classifier"),
        ("vectors", "embedding"),
        ("tiny-bert", "embedding"),
    ):
        told = call("GET", f"/tei/{task}/info").json()
        assert (
            told["model_id"] == task
            and list(told["model_type"]) == [kind]
            and told["max_input_length"] == engine.longest
        )


@pytest.mark.parametrize("task", ["names", "questions"])
def test_a_kind_that_text_embeddings_inference_lacks_has_no_info(call: Call, task: str) -> None:
    answer = call("GET", f"/tei/{task}/info")
    assert answer.status_code == 422 and f"{task!r} has a" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/v1/rerank", {"model": "topic", "query": "a", "documents": ["b"]}, 422, "one output for a pair"),
        ("/v1/rerank", {"model": "tiny-bert", "query": "a", "documents": ["b"]}, 422, "no head"),
        ("/v1/rerank", {"model": "nobody", "query": "a", "documents": ["b"]}, 404, "nobody"),
        ("/v1/rerank", {"model": "price", "query": "a", "documents": []}, 422, "no inputs"),
        ("/v1/rerank", {"model": "price", "query": " ", "documents": ["b"]}, 422, "empty"),
        ("/v1/rerank", {"model": "price", "query": "a", "documents": ["b"], "top_n": 0}, 422, "top_n"),
        ("/v1/score", {"model": "price", "text_1": ["a", "b"], "text_2": ["c"]}, 422, "found 2 and 1"),
        ("/v1/rerank", {"model": "price", "query": "a" * 100_000, "documents": ["b"] * 1000}, 413, "as often as it is"),
        ("/tei/names/predict", {"inputs": "a"}, 422, "no classes"),
        ("/tei/topic/predict", {"inputs": [["a", "b", "c"]]}, 422, "inputs"),
        ("/tei/topic/embed", {"inputs": "a"}, 422, "embeds nothing"),
        ("/tei/vectors/embed", {"inputs": "a", "dimensions": 65}, 422, "dimensions: 'vectors' gives 64"),
        ("/tei/topic/rerank", {"query": "a", "texts": ["b"]}, 422, "one output for a pair"),
    ],
)
def test_what_cannot_be_ranked_is_refused(call: Call, path: str, body: object, status: int, part: str) -> None:
    answer = call("POST", path, json=body)
    assert answer.status_code == status
    assert part in answer.json()["error"]["message"]


def test_a_text_without_a_task_goes_to_the_default_one(service: Service, engine: Engine) -> None:
    (topic,) = engine.infer([Query("topic", QUERY)])
    assert isinstance(topic, Classification)
    call = client_of(service, ServingSettings(default_task="topic"))
    found = call("POST", "/classify", json={"inputs": QUERY}).json()
    assert sorted(each["label"] for each in found) == sorted(topic.names)
    assert sum(each["score"] for each in found) == pytest.approx(1, abs=0.02)
    assert found[0]["label"] == topic.label
    named = call("POST", "/classify", json={"model": "topic", "input": QUERY}).json()
    assert named["data"][0]["label"] == topic.label
    for settings, body, part in (
        (ServingSettings(), {"inputs": QUERY}, "--default-task"),
        (ServingSettings(default_task="tags"), {"inputs": QUERY}, "one of several labels"),
        (ServingSettings(default_task="topic"), {"inputs": " "}, "empty"),
    ):
        answer = client_of(service, settings)("POST", "/classify", json=body)
        assert answer.status_code == 422 and part in answer.json()["error"]["message"]
    gone = client_of(service, ServingSettings(default_task="nobody"))("POST", "/classify", json={"inputs": QUERY})
    assert gone.status_code == 404


def test_a_default_task_that_labels_tokens_gives_spans(service: Service, engine: Engine) -> None:
    """In code points, also behind an emoji; and where a text was cut that was allowed to be."""
    text = "\U0001f600 Anna plays chess in the library"
    (tagged,) = engine.infer([Query("names", text)])
    assert isinstance(tagged, Tokens) and tagged.entities
    call = client_of(service, ServingSettings(default_task="names"))
    found = call("POST", "/classify", json={"inputs": text}).json()
    assert found["truncated_at"] is None
    assert [(own["label"], own["start"], own["end"]) for own in found["spans"]] == [
        (own.label, own.start, own.end) for own in tagged.entities
    ]
    long = " ".join(["chess"] * 600)
    refused = call("POST", "/classify", json={"inputs": long})
    assert refused.status_code == 422 and "truncation" in refused.json()["error"]["message"]
    cut = call("POST", "/classify", json={"inputs": long, "truncate": True}).json()
    assert 0 < cut["truncated_at"] < len(long) and (cut["truncated_at"] + 1) % len("chess ") == 0
    assert all(own["end"] <= cut["truncated_at"] for own in cut["spans"])
    assert call("POST", "/classify", json={"inputs": text + "\ufeff \u200b"}).json()["truncated_at"] is None
    each = len(engine.text.tokenizer.encode("chess", add_special_tokens=False).ids)
    full = " ".join(["chess"] * ((engine.longest - 2) // each))
    hidden = call("POST", "/classify", json={"inputs": f"{full}{' ' * 9000}library", "truncate": True}).json()
    assert hidden["truncated_at"] == len(full), "however much white space is before what was not read"
    spaces = call("POST", "/classify", json={"inputs": full + " " * 9000, "truncate": True}).json()
    assert spaces["truncated_at"] is None


def test_small_probabilities_are_told_apart() -> None:
    logits = np.linspace(-60, 20, 161, dtype=np.float32)
    np.testing.assert_allclose(sigmoid(logits), 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-6)
    results = [
        Regression(task="price", tokens=3, logits=np.array([logit], np.float32), score=0.0)
        for logit in (-16.0, 30.0, -15.9, 31.0, -16.0)
    ]
    assert best_first(results) == [3, 1, 2, 0, 4], "also where probabilities are 1 in 32 bits"
