"""A linear head on the frozen backbone's features of the texts, which training has to beat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from scipy.special import expit, log_expit, log_softmax, logit

from jpets.errors import InvalidInput
from jpets.model.encoder import Params, SplitEncoder
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.batches import Rows
from jpets.training.losses import IGNORED
from jpets.training.predict import Predictor
from jpets.types import Head

Values = Float[np.ndarray, " ..."]
"""Features of a text [d], or of its tokens [tokens, d]."""
STRENGTHS = (1e-3, 1e-2, 1e-1)
"""Inverse strengths of the penalty on the weights of standardised features, from which the held-out loss picks one."""
MOST_TEXTS = 4096
"""Texts that the head is fitted to: more would take longer than the comparison is worth."""
MOST_TOKENS = 32768
"""The same number of tokens, for a head on tokens."""
ITERATIONS = 200
SURE = 0.05
"""Least and most (from 1) that ridge regression takes a probability for: its logit has to be a number."""


class FrozenFeatures:
    """The input of a head from the bare backbone, in f32; one instance serves all tasks with heads that read alike."""

    def __init__(self, encoder: SplitEncoder, text: TextEncoder, params: Params, head: Head) -> None:
        size = encoder.config.hidden_size
        same = {"kernel": np.eye(size, dtype=np.float32), "bias": np.zeros(size, np.float32)}
        self._head = head if head.type == "embedding" else dataclasses.replace(head, tensors=same)
        self._predictor, self._params = Predictor(encoder, text, self._head), params

    def __call__(self, tokens: Sequence[Tokens]) -> list[Values]:
        """[d] of each text, or [tokens, d] for a head on tokens; for an embedding head its answers."""
        return self._predictor(self._params, self._head, tokens)


def can_fit(head: Head) -> bool:
    """Whether a linear head of this kind is fitted: heads for embeddings and for answers in a context are not."""
    return bool(head.tensors) and not head.dense and head.type != "question-answering"


def linear_head(head: Head, rows: Rows, features: Sequence[Values], judged: Rows, theirs: Sequence[Values]) -> Head:
    """``head`` with the weights that best separate the ``features`` of the first of ``rows`` (``fitted_rows``), chosen
    by the loss on ``judged`` with its features ``theirs``.

    Logistic regression for classes, for tags and, one by one, for labels; ridge regression for values. Raises
    ``InvalidInput`` where scikit-learn is not installed.
    """
    x, y, weights = _flat(rows, features)
    if not len(y):
        return head
    others, truth, counted = _flat(judged, theirs)
    middle, spread = x.mean(0), x.std(0) + 1e-6
    best, least = head, np.inf
    for strength in STRENGTHS:
        kernel, bias = _fitted(head, (x - middle) / spread, y, weights, strength)
        kernel = kernel / spread[:, None]
        bias = bias - middle @ kernel
        loss = _loss(head, others @ kernel + bias, truth, counted)
        if loss < least or best is head:
            least = loss
            tensors = {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}
            best = dataclasses.replace(head, tensors=tensors)
    return best


def fitted_rows(rows: Rows, seed: int) -> Rows:
    """The rows that a head is fitted to: all, or a sample by the seed if they are many."""
    most = MOST_TEXTS
    if rows.tags:
        sizes = np.cumsum([len(own.ids) for own in rows.tokens])
        most = min(most, max(1, int(np.searchsorted(sizes, MOST_TOKENS))))
    if len(rows.tokens) <= most:
        return rows
    return rows.take(np.random.default_rng(seed).permutation(len(rows.tokens))[:most])


def _flat(rows: Rows, features: Sequence[Values]) -> tuple[Values, npt.NDArray[Any], Values]:
    """(features [n, d], targets [n, ...], weights [n]) of texts, or of all tokens with a tag."""
    targets = list(rows.targets)
    if not rows.tags:
        return np.stack(features), np.stack(targets), rows.weights
    counted = [target != IGNORED for target in targets]
    x = np.concatenate([own[which] for own, which in zip(features, counted, strict=True)])
    y = np.concatenate([own[which] for own, which in zip(targets, counted, strict=True)])
    return x, y, np.ones(len(y), np.float32)


def _fitted(head: Head, x: Values, y: npt.NDArray[Any], weights: Values, strength: float) -> tuple[Values, Values]:
    """(kernel [d, C], bias [C])"""
    try:
        from sklearn.linear_model import Ridge
    except ModuleNotFoundError as error:
        raise InvalidInput("a linear head takes scikit-learn; install jpets[train]") from error
    if head.is_score:
        y = logit(np.clip(y, SURE, 1 - SURE))
    if head.problem == "regression":
        ridge = Ridge(alpha=1 / strength).fit(x, y.reshape(len(y), -1), sample_weight=weights)
        return ridge.coef_.reshape(head.outputs, -1).T, np.asarray(ridge.intercept_).reshape(-1)
    if head.problem == "multi-label":
        columns = [_logistic(x, y[:, label] > 0, weights, strength, 2) for label in range(head.outputs)]
        kernels = [kernel[:, 1] - kernel[:, 0] for kernel, _ in columns]
        return np.stack(kernels, -1), np.array([bias[1] - bias[0] for _, bias in columns])
    return _logistic(x, y, weights, strength, head.outputs)


def _logistic(x: Values, y: npt.NDArray[Any], weights: Values, strength: float, outputs: int) -> tuple[Values, Values]:
    """(kernel [d, C], bias [C]); classes that do not occur get a bias that makes them rarer than the rest."""
    from sklearn.linear_model import LogisticRegression

    kernel = np.zeros((x.shape[1], outputs), np.float32)
    known = np.unique(y).astype(int)
    bias = np.zeros(outputs, np.float32)
    if len(known) > 1:
        fit = LogisticRegression(C=strength, max_iter=ITERATIONS)
        fit.fit(x, y, sample_weight=weights)
        own, first = fit.coef_, fit.intercept_
        if len(known) == 2:
            own, first = np.concatenate([-own, own]) / 2, np.concatenate([-first, first]) / 2
        kernel[:, known], bias[known] = own.T, first
    missing = np.setdiff1d(np.arange(outputs), known)
    bias[missing] = bias[known].min() - np.log(2.0 * len(y))
    return kernel, bias


def _loss(head: Head, found: Values, truth: npt.NDArray[Any], weights: Values) -> float:
    if not len(truth):
        return 0.0
    if head.is_score:
        each = -(truth * log_expit(found) + (1 - truth) * log_expit(-found)).mean(-1)
    elif head.problem == "regression":
        each = np.square(found - truth).mean(-1)
    elif head.problem == "multi-label":
        chance = np.where(truth > 0, expit(found), expit(-found))
        each = -np.log(np.maximum(chance, 1e-30)).mean(-1)
    else:
        each = -log_softmax(found, axis=-1)[np.arange(len(truth)), truth.astype(int)]
    return float(np.average(each, weights=weights))
