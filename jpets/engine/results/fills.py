"""Words for the places of masks, as ``transformers``' fill-mask pipeline finds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpets.engine.results.numbers import softmax
from jpets.types import Fill, Fills, FloatArray

USUAL = 5
"""Words for each mask, unless another number is asked for."""


def probabilities(result: Fills) -> FloatArray:
    """The probability [masks, V] of each token: the head's norm, the products with all tokens' vectors, their biases,
    and the softmax (Devlin et al. 2019, appendix A.2: the output layer shares the embeddings' weights)."""
    vocabulary, own, x = result.masked.vocabulary, result.tensors, result.outputs
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + vocabulary.epsilon)
    vectors = unit * own["norm_weight"] + own["norm_bias"]
    return softmax(vectors.astype(np.float32) @ vocabulary.words.T + own["decoder_bias"])


def best_fills(
    result: Fills, count: int | None = None, targets: Sequence[str] | None = None
) -> tuple[tuple[Fill, ...], ...]:
    """For each mask the ``count`` most probable tokens, or of ``targets`` those, the most probable first.

    A ``Fill.sequence`` of a text's only mask has no special tokens; of several masks the others stay. Raises
    ``InvalidInput`` for a target without a token, and for none.
    """
    masked = result.masked
    vocabulary, probs = masked.vocabulary, probabilities(result)
    some = np.unique([vocabulary.token(each) for each in targets]) if targets else np.arange(probs.shape[-1])
    found = []
    for place, own in zip(masked.places.tolist(), probs[:, some], strict=True):
        fills = []
        for at in _best(own, USUAL if count is None else count):
            token, ids = int(some[at]), masked.ids.tolist()
            ids[place] = token
            sequence = vocabulary.spelled(ids, special=len(masked.places) > 1)
            fills.append(Fill(token, vocabulary.spelled([token]), float(own[at]), sequence))
        found.append(tuple(fills))
    return tuple(found)


def _best(probs: FloatArray, count: int) -> list[int]:
    """The places of the highest ones, the highest first; of equal ones the first."""
    some = np.argpartition(-probs, count - 1)[:count] if count < len(probs) else np.arange(len(probs))
    kept: list[int] = some[np.lexsort((some, -probs[some]))].tolist()
    return kept
