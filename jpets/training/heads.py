"""Heads at the start of a training."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from jpets.training.batches import Rows
from jpets.training.losses import IGNORED
from jpets.types import Head, HeadType, Pooling, Problem, Relevance

SCALE = 0.02


def new_head(
    kind: HeadType, problem: Problem, outputs: int, hidden_size: int, pooling: Pooling = "mean", seed: int = 0
) -> Head:
    """A linear head with small weights; for embeddings a head that only pools and normalises."""
    if kind == "embedding":
        return Head(kind, {}, pooling=pooling, normalize=True)
    kernel = np.random.default_rng(seed).normal(0, SCALE, (hidden_size, outputs)).astype(np.float32)
    tensors = {"kernel": kernel, "bias": np.zeros(outputs, np.float32)}
    value = problem == "regression" and outputs == 1  # it is learnt as it is
    relevance: Relevance | None = "raw" if value else None
    return Head(kind, tensors, problem=problem, pooling=pooling, relevance=relevance)


def at_the_usual_answer(head: Head, rows: Rows) -> Head:
    """The head with the bias that answers best without reading the text: log-frequencies of classes and tags, log-odds
    of labels, means of values. Heads for embeddings and for answers in a context stay as they are.

    If most answers are no, the first updates would otherwise teach everything below the head to say no, whatever the
    text (Lin et al. 2017, "Focal Loss for Dense Object Detection", section 3.3).
    """
    if head.type in ("embedding", "question-answering"):
        return head
    usual = np.average([_answer(head, target) for target in rows.targets], axis=0, weights=rows.weights)
    if head.problem != "regression" or head.is_score:
        least = 0.5 / (sum(map(len, rows.targets)) if rows.tags else len(rows.targets))
        usual = np.clip(usual, least, 1 - least)
        usual = np.log(usual / usual.sum() if head.problem == "single-label" else usual / (1 - usual))
    return dataclasses.replace(head, tensors={**head.tensors, "bias": usual.astype(np.float32)})


def usual_answer(head: Head, rows: Rows) -> Head:
    """A head that gives the answer that is right most often, whatever the text, and however much rows count; of tags
    each counts."""
    counts = [np.count_nonzero(own != IGNORED) if rows.tags else 1 for own in rows.targets]
    head = at_the_usual_answer(head, rows._replace(weights=np.maximum(np.asarray(counts, np.float32), 1e-6)))
    return dataclasses.replace(
        head, tensors={n: a if n == "bias" else np.zeros_like(a) for n, a in head.tensors.items()}
    )


def _answer(head: Head, target: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[C]: a row's values, or each class's share of the row's labels that count."""
    if target.dtype.kind == "f":
        return target
    counted = target[target != IGNORED]
    return np.bincount(counted, minlength=head.outputs) / max(1, len(counted))
