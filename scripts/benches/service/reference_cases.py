"""What is asked of each head, and what transformers and Sentence-Transformers answer to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx
import numpy as np
import tritonclient.grpc
import tritonclient.http
from huggingface_hub import InferenceClient

from benches.service.library_models import HEADS, Made, pipeline

STRATEGIES = ("none", "simple", "first", "average", "max")
STRIDE, MOST = 32, 512
"""Of windows: tokens that two of them share, and tokens of one."""
CANDIDATES = ["a game", "science", "music"]
ZERO_SHOT = 50
"""Texts for labels of one's own: each takes three pairs."""
QUESTIONS = ("What does it do?", "Which files does it contain?", "Who wrote it?")
READING: Mapping[str, Any] = {"top_k": 3, "doc_stride": 128, "max_seq_len": 384, "max_answer_len": 15}
QUERY = "a program that reads files"
TIMEOUT = 300.0
HUB = "Hugging Face"


class Case(NamedTuple):
    """A request and its answer, as plain data, of which ``answers`` are counted. ``may_differ`` where the library is
    known to answer otherwise."""

    head: str
    client: str
    ask: Callable[[], Any]
    expected: Any
    answers: int = 1
    may_differ: bool = False


class Asking:
    """Requests to a server, beside the libraries' ``made`` models."""

    def __init__(self, made: Mapping[str, Made], texts: Sequence[str], url: str, grpc: str) -> None:
        self._made, self._texts, self._url, self._grpc = made, texts, url, grpc
        self._pipes: dict[str, Any] = {name: pipeline(name, made[name]) for name in HEADS}
        tokenizer = made["topic"].tokenizer
        self._length = {text: len(tokenizer(text)["input_ids"]) for text in texts}

    @property
    def reads_questions(self) -> bool:
        """Whether this transformers has a pipeline for questions."""
        return self._pipes["questions"] is not None

    def cases(self) -> Iterator[Case]:
        yield from self._classes()
        yield from self._zero_shot()
        yield from self._names()
        if self.reads_questions:
            yield from self._questions()
        yield from self._masks()
        yield from self._vectors()
        yield from self._pairs()
        yield from self._logits()

    def _hub(self, task: str) -> InferenceClient:
        return InferenceClient(model=f"{self._url}/hf/{task}", token="none", timeout=TIMEOUT)

    def _classes(self) -> Iterator[Case]:
        for name in ("topic", "tags", "price"):
            found = self._pipes[name](list(self._texts), top_k=None, truncation=True)
            for text, scores in zip(self._texts, found, strict=True):
                ask = partial(_labels, self._hub(name), text)
                yield Case(name, HUB, ask, {own["label"]: own["score"] for own in scores})

    def _zero_shot(self) -> Iterator[Case]:
        for text in self._texts[:: max(1, len(self._texts) // ZERO_SHOT)]:
            if self._length[text] > MOST - 20:  # the hypothesis comes behind it
                continue
            found = self._pipes["meaning"](text, CANDIDATES)
            expected = dict(zip(found["labels"], found["scores"], strict=True))
            yield Case("labels of one's own", "httpx", partial(self._own_labels, text), expected)

    def _names(self) -> Iterator[Case]:
        for how in STRATEGIES:
            windows: dict[str, Any] = {} if how == "none" else {"stride": STRIDE}
            for text in self._texts:
                if how != "none" or self._length[text] <= MOST:
                    ask = partial(_entities, self._hub("names"), text, how, windows)
                    found = self._pipes["names"](text, aggregation_strategy=how, **windows)
                    yield Case(f"names, {how}", HUB, ask, [_entity(own) for own in found])

    def _questions(self) -> Iterator[Case]:
        for at, text in enumerate(self._texts):
            question = QUESTIONS[at % len(QUESTIONS)]
            found = self._pipes["questions"](question=question, context=text, align_to_words=False, **READING)
            ask = partial(_spans, self._hub("questions"), question, text)
            expected = [_span(own) for own in found]
            yield Case("questions", HUB, ask, expected, may_differ=_are_merged(expected, text))

    def _masks(self) -> Iterator[Case]:
        for text in self._texts:
            if self._length[text] < MOST:
                words = text.split(" ")
                masked = " ".join([*words[: len(words) // 2], "[MASK]", *words[len(words) // 2 :]])
                found = self._pipes["words"](masked, top_k=3)
                yield Case("masks", HUB, partial(_filled, self._hub("words"), masked), [_fill(own) for own in found])

    def _vectors(self) -> Iterator[Case]:
        """Embeddings, and how alike two texts are."""
        vectors = self._made["vectors"].model.encode(list(self._texts), convert_to_numpy=True)
        for at, text in enumerate(self._texts):
            other, hub = (at + 1) % len(self._texts), self._hub("vectors")
            yield Case("vectors", HUB, partial(_embedding, hub, text), [vectors[at].tolist()])
            alike = float(vectors[at] @ vectors[other])
            yield Case("how alike", HUB, partial(_alike, hub, text, self._texts[other]), [alike])

    def _pairs(self) -> Iterator[Case]:
        """Scores of pairs, one by one and ranked."""
        model, texts = self._made["rank"].model, list(self._texts)
        scores = [float(own) for own in model.predict([(QUERY, text) for text in texts])]

        def scored() -> Any:
            found = self._post("/v1/score", {"model": "rank", "text_1": QUERY, "text_2": texts})
            return [own["score"] for own in found["data"]]

        def ranked() -> Any:
            found = self._post("/v1/rerank", {"model": "rank", "query": QUERY, "documents": texts})
            return [{"index": own["index"], "score": own["relevance_score"]} for own in found["results"]]

        best = [{"index": int(own["corpus_id"]), "score": float(own["score"])} for own in model.rank(QUERY, texts)]
        yield Case("pairs, scored", "httpx", scored, scores, len(scores))
        yield Case("pairs, ranked", "httpx", ranked, best, len(best))

    def _logits(self) -> Iterator[Case]:
        """All texts in one request, over HTTP and gRPC."""
        raw = self._pipes["topic"](list(self._texts), top_k=None, truncation=True, function_to_apply="none")
        scores = [{own["label"]: own["score"] for own in each} for each in raw]
        rows = [[each[label] for label in HEADS["topic"][1]] for each in scores]
        addresses = {"gRPC": (tritonclient.grpc, self._grpc), "HTTP": (tritonclient.http, self._url.partition("//")[2])}
        for kind, (client, address) in addresses.items():
            ask = partial(_inferred, client, address, self._texts)
            yield Case("topic, logits", f"Triton, {kind}", ask, rows, len(rows))

    def _own_labels(self, text: str) -> Any:
        """Not by Hugging Face's client, whose versions before 1 read another shape of the answer."""
        found = self._post("/hf/meaning", {"inputs": text, "parameters": {"candidate_labels": CANDIDATES}})
        return {own["label"]: own["score"] for own in found}

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return httpx.post(f"{self._url}{path}", json=body, timeout=TIMEOUT).raise_for_status().json()


def _labels(client: InferenceClient, text: str) -> Any:
    return {own.label: own.score for own in client.text_classification(text)}


def _entities(client: InferenceClient, text: str, how: Any, windows: Mapping[str, Any]) -> Any:
    return [_entity(own) for own in client.token_classification(text, aggregation_strategy=how, **windows)]


def _spans(client: InferenceClient, question: str, text: str) -> Any:
    found = client.question_answering(question, text, align_to_words=False, **READING)
    return [_span(own) for own in (found if isinstance(found, list) else [found])]


def _are_merged(answers: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether ``transformers`` added up scores of the same words in several places, or filled up with an answer of
    nothing."""
    return any(not own["answer"] or text.count(own["answer"].strip()) > 1 for own in answers)


def _filled(client: InferenceClient, masked: str) -> Any:
    return [_fill(own) for own in client.fill_mask(masked, top_k=3)]


def _embedding(client: InferenceClient, text: str) -> Any:
    return np.asarray(client.feature_extraction(text)).tolist()


def _alike(client: InferenceClient, text: str, other: str) -> Any:
    return client.sentence_similarity(text, [other])


def _inferred(client: Any, address: str, texts: Sequence[str]) -> Any:
    tensor = client.InferInput("text", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object))
    with client.InferenceServerClient(address) as own:
        return own.infer("topic", [tensor]).as_numpy("logits").tolist()


def _plain(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Some of an answer's fields, with Python's numbers."""
    return {name: found[name].item() if hasattr(found[name], "item") else found[name] for name in names}


def _entity(found: Mapping[str, Any]) -> dict[str, Any]:
    label = found.get("entity_group") or found.get("entity")
    return {**_plain(found, "score", "start", "end", "word"), "label": label}


def _span(found: Mapping[str, Any]) -> dict[str, Any]:
    return _plain(found, "score", "start", "end", "answer")


def _fill(found: Mapping[str, Any]) -> dict[str, Any]:
    return _plain(found, "score", "token", "token_str", "sequence")
