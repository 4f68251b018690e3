"""Words for the places of masks, as ``transformers``' fill-mask pipeline finds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jpets.engine.results.numbers import softmax
from jpets.errors import InvalidInput
from jpets.fills import Vocabulary
from jpets.types import Fill, Fills, FloatArray

Ints = npt.NDArray[np.integer]
USUAL = 5
"""Words for each mask, unless another number is asked for."""
MOST = 100
"""Words for each mask, each with its whole text."""
MOST_TARGETS = 1000


def probabilities(result: Fills) -> FloatArray:
    """The probability [masks, V] of each token: the head's norm, the products with all tokens' vectors, their biases,
    and the softmax (Devlin et al. 2019, appendix A.2: the output layer shares the embeddings' weights)."""
    vocabulary, own, x = result.masked.vocabulary, result.tensors, result.outputs
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + vocabulary.epsilon)
    vectors = unit * own["norm_weight"] + own["norm_bias"]
    return softmax(vectors.astype(np.float32) @ vocabulary.words.T + own["decoder_bias"])


def tokens_of(vocabulary: Vocabulary, targets: Sequence[str]) -> Ints:
    """The tokens that words are, or begin with, each once. Raises ``InvalidInput`` for a word without one, and for too
    many or none."""
    if not 1 <= len(targets) <= MOST_TARGETS:
        raise InvalidInput(f"targets: expected 1 to {MOST_TARGETS} words, found {len(targets)}")
    return np.unique([vocabulary.token(each) for each in targets])


def best_fills(result: Fills, count: int | None = None, among: Ints | None = None) -> tuple[tuple[Fill, ...], ...]:
    """For each mask the ``count`` most probable tokens, of the tokens ``among`` if they are given, the most probable
    first.

    A ``Fill.sequence`` of a text's only mask has no special tokens; of several masks the others stay. Raises
    ``InvalidInput`` for a high ``count``.
    """
    if count is not None and count > MOST:
        raise InvalidInput(f"top_k: expected at most {MOST} words for a mask, found {count}")
    masked = result.masked
    vocabulary, probs = masked.vocabulary, probabilities(result)
    found = []
    for place, each in zip(masked.places.tolist(), probs, strict=True):
        own = each if among is None else each[among]
        fills = []
        for at in _best(own, USUAL if count is None else count):
            token, ids = at if among is None else int(among[at]), masked.ids.tolist()
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
