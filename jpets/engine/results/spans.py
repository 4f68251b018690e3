"""From the start and end logits of a question's tokens to the span that answers it."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from jpets.passage import Passage
from jpets.types import FloatArray

MAX_ANSWER_TOKENS = 30
"""Tokens of the longest answer."""


def best_span(logits: FloatArray, passage: Passage, longest: int = MAX_ANSWER_TOKENS) -> tuple[int, int, float]:
    """Start, end (exclusive) and probability of the most probable span of ``passage``; the first of equal ones.

    ``logits`` [tokens, 2] are a query's. The probability is the one of Hugging Face's question-answering pipeline: the
    start's times the end's, each a softmax over the passage and the special token before it (``Passage.null``), which
    is never the answer. So a model trained to point there if a context has no answer gives a low probability.
    """
    kept = logits[passage.start : passage.end].astype(np.float64)
    rivals = np.concatenate([logits[: int(passage.null)].astype(np.float64), kept])
    ends = np.pad(kept[:, 1], (0, longest - 1), constant_values=-np.inf)
    spans = kept[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, longest)  # [first token, tokens after it]
    first, more = np.unravel_index(int(spans.argmax()), spans.shape)
    score = float(np.exp(spans[first, more] - logsumexp(rivals, axis=0).sum()))
    start = passage.start + int(first)
    return start, start + int(more) + 1, score
