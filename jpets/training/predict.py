"""Answers of tasks to texts, outside an engine: to evaluate tasks, and to compare them with each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jpets.deltas import merge_deltas
from jpets.model.encoder import Params, SplitEncoder
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.forward import HeadTensors, TextRows, acts_beside, task_outputs
from jpets.training.tokens import by_length
from jpets.types import UNLABELLED, Delta, Head, Task

Answer = Float[np.ndarray, " ..."]
"""The answer to one text: see ``Predictor``."""
BATCH = 32


class Predictor:
    """Answers of tasks of one shape in f32: its programs are compiled once for all their parameters.

    ``head`` and ``deltas`` give the shape. Deltas that change weights are merged first.
    """

    def __init__(self, encoder: SplitEncoder, text: TextEncoder, head: Head, deltas: Sequence[Delta] = ()) -> None:
        self._text, self._head, self._config = text, head, encoder.config
        beside = _beside(deltas)

        def answer(params: Params, tensors: HeadTensors, own: Sequence[Any], rows: TextRows) -> tuple[Any, Any]:
            bound = [dataclasses.replace(delta, tensors=part) for delta, part in zip(beside, own, strict=True)]
            outputs = task_outputs(encoder, params, bound, head, tensors, rows)
            return outputs.pooled, outputs.logits

        self._answer = jax.jit(answer)

    def __call__(
        self, params: Params, head: Head, tokens: Sequence[Tokens], deltas: Sequence[Delta] = ()
    ) -> list[Answer]:
        """Logits of each text: [C], [tokens, C] of a head on tokens, the vector of an embedding head."""
        both = self.both(params, head, tokens, deltas)
        answers = [logits if head.tensors else pooled for pooled, logits in both]
        if head.reads_tokens:
            return [own[: len(each.ids)] for own, each in zip(answers, tokens, strict=True)]
        return answers

    def both(
        self, params: Params, head: Head, tokens: Sequence[Tokens], deltas: Sequence[Delta] = ()
    ) -> list[tuple[Float[np.ndarray, " d"], Answer]]:
        """(pooled vector, logits) of each text; the logits of a head on tokens are those of a longer text, padded."""
        found: list[Any] = [None] * len(tokens)
        tensors, own = jax.tree.map(jnp.asarray, (dict(head.tensors), [dict(each.tensors) for each in _beside(deltas)]))
        merged = [delta for delta in deltas if not acts_beside(delta)]
        params = merge_deltas(merged, self._config, jax.tree.map(jnp.asarray, dict(params)))
        for numbers, rows in by_length(tokens, BATCH, self._text):
            pooled, logits = (np.asarray(each) for each in self._answer(params, tensors, own, rows))
            for at, number in enumerate(numbers):
                found[number] = pooled[at], logits[at]
        return found


def group_logits(
    task: Task, encoder: SplitEncoder, params: Params, text: TextEncoder, tokens: Sequence[Tokens]
) -> Float[np.ndarray, "m n c"]:
    """What a group of students answers by its first 1, 2, ... students (Student Parallelism equation 1)."""
    assert task.students is not None
    vectors = []
    for own in task.parts:
        predictor = Predictor(encoder, text, own.head, own.deltas)
        vectors.append(np.stack(predictor(params, own.head, tokens, own.deltas)))
    weights = np.asarray(task.students.multipliers, np.float32)[:, None, None]
    sums = np.cumsum(weights * np.stack(vectors), 0)
    return np.asarray(sums @ task.head.tensors["kernel"] + task.head.tensors["bias"], np.float32)


def _beside(deltas: Sequence[Delta]) -> list[Delta]:
    """The deltas that act next to the weights."""
    return [delta for delta in deltas if acts_beside(delta)]


def of_texts(answers: Sequence[Answer], tokens: Sequence[Tokens]) -> Sequence[Answer]:
    """Answers without tokens outside the text, if ``tokens`` say which these are."""
    return [
        each if own.spelling is None else each[own.spelling.of_text >= 0]
        for each, own in zip(answers, tokens, strict=True)
    ]


def agreement(a: Sequence[Answer], b: Sequence[Answer], head: Head) -> float:
    """How much two models agree, from 0 to 1.

    Share of equal best classes, of equal label sets (multi-label), of equal tags over all tokens, of equal best starts
    and ends (question answering); of regressions the squared correlation, the least of several outputs; of embeddings,
    and of what a head that fills masks makes of a text's tokens, the mean cosine.
    """
    if head.type in ("embedding", "fill-mask"):
        cosines = [
            float(np.vdot(x, y) / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-12)) for x, y in zip(a, b, strict=True)
        ]
        return float(np.mean(cosines))
    if head.type == "question-answering":
        return float(np.mean([np.array_equal(x.argmax(0), y.argmax(0)) for x, y in zip(a, b, strict=True)]))
    if head.reads_tokens:
        equal = np.concatenate([x.argmax(-1) == y.argmax(-1) for x, y in zip(a, b, strict=True)])
        return float(equal.mean()) if equal.size else 1.0
    x, y = np.stack(a), np.stack(b)
    if head.problem == "regression":
        return min(map(_shared_variance, x.T, y.T))
    if head.problem == "multi-label":
        return float(((x > 0) == (y > 0)).all(-1).mean())
    return float((x.argmax(-1) == y.argmax(-1)).mean())


def _shared_variance(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:  # a correlation with a constant is not defined
        return float(np.allclose(a, b))
    return float(np.corrcoef(a, b)[0, 1] ** 2)


def agreement_by_label(a: Sequence[Answer], b: Sequence[Answer], head: Head) -> list[float] | None:
    """For each label that ``a`` gives somewhere, the share of those places where ``b`` gives it too; None for heads
    that answer with values, vectors or places in a text.

    A constant answer agrees with a model that mostly gives it, but not on its rare labels.
    """
    if head.type in UNLABELLED or head.problem == "regression":
        return None
    if head.problem == "multi-label" and not head.reads_tokens:
        given, found = np.stack(a) > 0, np.stack(b) > 0
        return [float(found[given[:, label], label].mean()) for label in np.flatnonzero(given.any(0))]
    best, other = (np.concatenate([np.atleast_1d(each.argmax(-1)) for each in side]) for side in (a, b))
    return [float((other[best == label] == label).mean()) for label in np.unique(best)]


def varies(answers: Sequence[Answer], head: Head) -> bool:
    """Whether a model's answers to several texts are not all the same, so that agreement with them has a meaning."""
    if head.type == "fill-mask":
        answers = [each.mean(0) for each in answers]
    if head.type in ("embedding", "fill-mask") or head.problem == "regression":
        return len(answers) > 1 and bool(np.ptp(np.stack(answers), axis=0).max() > 1e-6)
    if head.type == "question-answering":
        return len({tuple(each.argmax(0).tolist()) for each in answers}) > 1
    if head.problem == "multi-label" and not head.reads_tokens:
        return len({tuple((each > 0).tolist()) for each in answers}) > 1
    return len(np.unique(np.concatenate([np.atleast_1d(each.argmax(-1)) for each in answers]))) > 1
