"""From a row's outputs to the answer of its head."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from jpets.engine.results.entities import entities
from jpets.engine.results.numbers import normalized, sigmoid, softmax
from jpets.errors import InvalidInput, InvalidTask, JpetsError, NotFinite
from jpets.fills import Masked
from jpets.passage import Passage
from jpets.spans import best_span
from jpets.spelling import Spelling
from jpets.types import (
    QA_OUTPUTS,
    UNLABELLED,
    Classification,
    Embedding,
    Failure,
    Fills,
    FloatArray,
    Regression,
    Result,
    Span,
    Task,
    Timing,
    Tokens,
)

DEFAULT_THRESHOLD = 0.5
TASK_FAILS = "the task's parameters gave NaN or Inf for this text; upload a repaired version of the task"
BACKBONE_FAILS = (
    "the backbone gave NaN or Inf for this text, without any task's parameters; serve it in float32, or a repaired one"
)


def check_answers(task: Task) -> None:
    """Raises ``InvalidTask`` if the task's description of its outputs does not fit the head."""
    if task.head.type == "question-answering" and (task.head.outputs != QA_OUTPUTS or task.labels):
        raise InvalidTask(
            f"task {task.id!r} has {task.head.outputs} outputs and {len(task.labels)} labels; question answering needs "
            f"{QA_OUTPUTS} outputs, start and end, and no labels"
        )
    named = task.head.type not in UNLABELLED and task.head.problem != "regression"
    limits = task.preprocessing.thresholds
    for what, found in (
        ("labels", len(task.labels) if named else None),
        ("thresholds", len(limits) if limits else None),
    ):
        if found is not None and found != task.head.outputs:
            raise InvalidTask(f"task {task.id!r} has {found} {what} for {task.head.outputs} outputs; give one for each")


def as_refusal(error: Exception) -> JpetsError:
    """The error of a query that no row can be made of."""
    return error if isinstance(error, JpetsError) else InvalidInput("the query is malformed")


def failure(task: str | None, error: JpetsError, tokens: int = 0, timing: Timing | None = None) -> Failure:
    return Failure(task=task, tokens=tokens, timing=timing, error=error)


def row_result(
    task: Task | None,
    tokens: int,
    timing: Timing,
    finite: bool,
    pooled: FloatArray,
    logits: npt.NDArray[np.float32] | None,
    passage: Passage | None = None,
    masked: Masked | None = None,
    *,
    normalize: bool = True,
) -> Result:
    """The result of one row: ``pooled`` [d]; ``logits`` [C], [tokens, C] for heads on tokens, None without a head.

    A question's row has a ``passage``; its answer has no words yet, and labelled tokens spell nothing (``worded``).
    ``normalize`` applies to rows without a task.
    """
    name = task.id if task else None
    numbers = pooled if logits is None else logits
    if not (finite and np.isfinite(numbers).all()):
        plain = task is None or task.id == task.backbone.name
        return failure(name, NotFinite(BACKBONE_FAILS if plain else TASK_FAILS), tokens, timing)
    if task is None or task.head.type == "embedding":
        scaled = normalized(numbers) if (normalize if task is None else task.head.normalize) else numbers
        return Embedding(task=name, tokens=tokens, timing=timing, embedding=np.array(scaled, np.float32))
    assert logits is not None
    if task.head.type == "token-classification":
        return Tokens(task=name, tokens=tokens, timing=timing, logits=logits, names=task.labels)
    if masked is not None:
        at = logits[masked.places]
        return Fills(task=name, tokens=tokens, timing=timing, outputs=at, masked=masked, tensors=task.head.tensors)
    if passage is not None:
        start, end, score = best_span(logits, passage)
        return Span(task=name, tokens=tokens, timing=timing, logits=logits, start=start, end=end, score=score)
    if task.head.problem == "regression":
        return _regression(task, tokens, timing, logits)
    return _classification(task, tokens, timing, logits)


def worded(result: Result, passage: Passage | None, spelling: Spelling | None) -> Result:
    """A ``Span`` with its answer's text, if that is known, and ``Tokens`` with their entities; any other result as it
    is."""
    if passage is not None and isinstance(result, Span):
        return dataclasses.replace(result, answer=passage.answer(result.start, result.end))
    if spelling is not None and isinstance(result, Tokens):
        found = entities(softmax(result.logits), result.names, spelling)
        return dataclasses.replace(result, entities=found, spelling=spelling)
    return result


def _regression(task: Task, tokens: int, timing: Timing, logits: FloatArray) -> Regression:
    scores = sigmoid(logits) if task.head.is_score else logits
    return Regression(
        task=task.id,
        tokens=tokens,
        timing=timing,
        logits=logits,
        score=float(scores[0]),
        names=task.labels,
        is_score=task.head.is_score,
    )


def _classification(task: Task, tokens: int, timing: Timing, logits: FloatArray) -> Classification:
    multi = task.head.problem == "multi-label"
    probs = sigmoid(logits) if multi else softmax(logits)
    best = int(probs.argmax())
    chosen: tuple[str, ...] = ()
    if multi:
        limits = task.preprocessing.thresholds or (DEFAULT_THRESHOLD,) * len(probs)
        chosen = tuple(label for label, p, limit in zip(task.labels, probs, limits, strict=True) if p >= limit)
    return Classification(
        task=task.id,
        tokens=tokens,
        timing=timing,
        logits=logits,
        probs=probs,
        label=task.labels[best],
        score=float(probs[best]),
        labels=chosen,
        names=task.labels,
        multi_label=multi,
    )
