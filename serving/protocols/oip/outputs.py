"""From results to the Open Inference Protocol's outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpets.engine.results.fills import best_fills
from jpets.engine.results.numbers import softmax
from jpets.errors import Saturated
from jpets.types import Classification, Embedding, Fills, FloatArray, Regression, Result, Span, Task, Tokens
from serving.protocols.oip.tensors import Array, Ints
from serving.requests.answers import REPLACED, Render, outcomes, shared_layers

JSON = "json"
"""The output that is given only where a request names it: a row's answer as JSON."""


def outputs_of(task: Task | None, vector_size: int) -> list[dict[str, Any]]:
    """Metadata of a model's outputs; those of a group say how many students made them."""
    own = _outputs_of(task, vector_size)
    if task is not None and task.head.type != "embedding":
        own = [*own, _each(JSON, "BYTES")]
    return own if task is None or task.students is None else [*own, _each("students", "INT64")]


def _outputs_of(task: Task | None, vector_size: int) -> list[dict[str, Any]]:
    if task is None or task.head.type == "embedding":
        return [{"name": "embedding", "datatype": "FP32", "shape": [-1, vector_size]}]
    if task.head.type == "fill-mask":
        kinds = {"token": "INT64", "text": "BYTES", "score": "FP32"}
        masks = [{"name": name, "datatype": kind, "shape": [-1, -1]} for name, kind in kinds.items()]
        return [*masks, _each("lengths", "INT64")]
    rows = [-1, -1] if task.head.reads_tokens else [-1]
    logits = {"name": "logits", "datatype": "FP32", "shape": [*rows, task.head.outputs]}
    label = {"name": "label", "datatype": "BYTES", "shape": rows}
    score = {"name": "score", "datatype": "FP32", "shape": rows}
    if task.head.type == "token-classification":
        return [logits, label, score, _each("lengths", "INT64")]
    if task.head.type == "question-answering":
        places = [_each("start", "INT64"), _each("end", "INT64")]
        return [logits, *places, _each("score", "FP32"), _each("answer", "BYTES"), _each("lengths", "INT64")]
    if task.head.problem == "regression":
        return [logits, score]
    probs = {"name": "probs", "datatype": "FP32", "shape": logits["shape"]}
    chosen = [_each("labels", "BYTES")] if task.head.problem == "multi-label" else []
    return [logits, label, score, probs, *chosen]


def _each(name: str, datatype: str) -> dict[str, Any]:
    """Metadata of an output with one value a row."""
    return {"name": name, "datatype": datatype, "shape": [-1]}


ANSWERS = (_each("answer", "BYTES"), _each("shared_layers", "INT64"))
"""Metadata of the outputs where rows are for several tasks: each one's answer as JSON, or its error, and how many
layers it shared with others."""


def answers_of(results: Sequence[Result], rendered: Render) -> dict[str, Array]:
    """The outputs of several tasks' results."""
    shared = [shared_layers(result) for result in results]
    answers = as_json(outcomes(results, rendered))
    return {"answer": answers, "shared_layers": np.array(shared, np.int64)}


def as_json(rows: Iterable[Mapping[str, Any]]) -> Array:
    return np.array([json.dumps(row, ensure_ascii=False) for row in rows], object)


def tensors_of(results: Sequence[Result]) -> dict[str, Array]:
    """The outputs of one task's results, by name; none may be an error. Texts are in arrays of objects or of Unicode.

    Raises ``Saturated`` where rows saw different versions of the task with outputs of different shapes.
    """
    if len({_layout(result) for result in results}) > 1:
        raise Saturated(REPLACED)
    students = [result.students for result in results if result.students is not None]
    own = _tensors_of(results)
    return {**own, "students": np.array(students, np.int64)} if students else own


def _tensors_of(results: Sequence[Result]) -> dict[str, Array]:
    first = results[0]
    if isinstance(first, Embedding):
        return {"embedding": np.stack([r.embedding for r in results if isinstance(r, Embedding)])}
    if isinstance(first, Tokens):
        return _token_tensors([r for r in results if isinstance(r, Tokens)])
    if isinstance(first, Span):
        return _span_tensors([r for r in results if isinstance(r, Span)])
    if isinstance(first, Fills):
        return _fill_tensors([r for r in results if isinstance(r, Fills)])
    rows = [r for r in results if isinstance(r, (Classification, Regression))]
    logits, score = np.stack([r.logits for r in rows]), np.array([r.score for r in rows], np.float32)
    if isinstance(first, Regression):
        return {"logits": logits, "score": score}
    classes = [r for r in rows if isinstance(r, Classification)]
    label, probs = np.array([r.label for r in classes]), np.stack([r.probs for r in classes])
    found = {"logits": logits, "label": label, "score": score, "probs": probs}
    return {**found, "labels": np.array([_chosen(r) for r in classes], object)} if classes[0].multi_label else found


def _chosen(result: Classification) -> str:
    """The labels over their thresholds with their scores, as JSON."""
    scores = dict(zip(result.names, result.probs.tolist(), strict=True))
    listed = [{"label": name, "score": scores[name]} for name in result.labels]
    return json.dumps(listed, ensure_ascii=False)


def _layout(result: Result) -> tuple[str, tuple[str, ...], bool, int, bool]:
    names = result.names if isinstance(result, (Classification, Tokens)) else ()
    several = isinstance(result, Classification) and result.multi_label
    values = 0
    if isinstance(result, Regression):
        values = result.logits.size
    elif isinstance(result, Embedding):
        values = result.embedding.size
    return type(result).__name__, names, several, values, result.students is None


def _token_tensors(rows: Sequence[Tokens]) -> dict[str, Array]:
    """Tokens that belong to no text, such as special ones, get an empty label and the score 0."""
    logits, lengths = _padded([r.logits for r in rows])
    label = np.full(logits.shape[:2], "", dtype=object)
    score = np.zeros(logits.shape[:2], np.float32)
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        probs, own = softmax(row.logits), row.spelling.of_text if row.spelling else np.zeros(length, np.int8)
        score[at, :length] = np.where(own >= 0, probs.max(-1), 0)
        label[at, :length] = [
            row.names[best] if of >= 0 else "" for best, of in zip(probs.argmax(-1), own, strict=True)
        ]
    return {"logits": logits, "label": label, "score": score, "lengths": lengths}


def _span_tensors(rows: Sequence[Span]) -> dict[str, Array]:
    """``start`` and ``end`` (exclusive) count tokens; ``answer`` is empty where ids were sent, not texts."""
    logits, lengths = _padded([r.logits for r in rows])
    start, end = np.array([r.start for r in rows], np.int64), np.array([r.end for r in rows], np.int64)
    score = np.array([r.score for r in rows], np.float32)
    answer = np.array([r.answer.text if r.answer is not None else "" for r in rows], dtype=object)
    return {"logits": logits, "start": start, "end": end, "score": score, "answer": answer, "lengths": lengths}


def _fill_tensors(rows: Sequence[Fills]) -> dict[str, Array]:
    """The most probable token of each mask [N, most masks], -1 and an empty text behind the last one."""
    found = [[own[0] for own in best_fills(row, 1)] for row in rows]
    lengths = np.array([len(each) for each in found], np.int64)
    shape = len(rows), int(lengths.max())
    token, text, score = np.full(shape, -1, np.int64), np.full(shape, "", object), np.zeros(shape, np.float32)
    for at, each in enumerate(found):
        token[at, : len(each)] = [own.token for own in each]
        text[at, : len(each)] = [own.text for own in each]
        score[at, : len(each)] = [own.score for own in each]
    return {"token": token, "text": text, "score": score, "lengths": lengths}


def _padded(logits: Sequence[FloatArray]) -> tuple[FloatArray, Ints]:
    """Logits [tokens, C] of several rows as [N, most tokens, C], with zeros behind, and each row's number of tokens."""
    lengths = np.array([len(each) for each in logits], np.int64)
    padded = np.zeros((len(logits), int(lengths.max()), logits[0].shape[-1]), np.float32)
    for row, each in zip(padded, logits, strict=True):
        row[: len(each)] = each
    return padded, lengths
