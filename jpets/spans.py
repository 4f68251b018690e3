"""From the start and end logits of a question's tokens to the span that answers it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from scipy.special import logsumexp

from jpets.passage import Passage
from jpets.types import FloatArray

MAX_ANSWER_TOKENS = 30
"""Tokens of the longest answer."""


def best_span(logits: FloatArray, passage: Passage, longest: int = MAX_ANSWER_TOKENS) -> tuple[int, int, float]:
    """The first of ``best_spans``."""
    return best_spans(logits, passage, 1, longest)[0]


def no_answer(logits: FloatArray, passage: Passage) -> float:
    """The probability that the answer both begins and ends with the special token before the passage: that it has
    none. 0 without such a token."""
    if not passage.null:
        return 0.0
    rivals = np.concatenate([logits[:1], logits[passage.start : passage.end]]).astype(np.float64)
    return float(np.exp((rivals[0] - logsumexp(rivals, axis=0)).sum()))


def best_spans(
    logits: FloatArray, passage: Passage, count: int, longest: int = MAX_ANSWER_TOKENS
) -> list[tuple[int, int, float]]:
    """Start, end (exclusive) and probability of the ``count`` most probable spans of ``passage``, the first of equal
    ones first.

    ``logits`` [tokens, 2] are a query's. The probability is the one of Hugging Face's question-answering pipeline: the
    start's times the end's, each a softmax over the passage and the special token before it (``Passage.null``), which
    is never the answer. So a model trained to point there if a context has no answer gives a low probability.
    """
    longest = min(longest, passage.end - passage.start)
    kept = logits[passage.start : passage.end].astype(np.float64)
    rivals = np.concatenate([logits[: int(passage.null)].astype(np.float64), kept])
    ends = np.pad(kept[:, 1], (0, longest - 1), constant_values=-np.inf)
    spans = kept[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, longest)  # [first token, tokens after it]
    flat = spans.ravel()
    best = [int(flat.argmax())] if count == 1 else _largest(flat, count).tolist()
    norm = logsumexp(rivals, axis=0).sum()
    found = []
    for at in best:
        first, more = divmod(at, longest)
        if np.isfinite(flat[at]):
            start = passage.start + first
            found.append((start, start + more + 1, float(np.exp(flat[at] - norm))))
    return found


def _largest(scores: Float[np.ndarray, " s"], count: int) -> Int[np.ndarray, " c"]:
    """The places of the ``count`` largest, the first of equal ones first."""
    if count < len(scores):
        least = np.partition(scores, -count)[-count]
        places = np.flatnonzero(scores >= least)
        return places[np.argsort(-scores[places], kind="stable")[:count]]
    return np.argsort(-scores, kind="stable")
