"""N-grams of token ids around each token of a text, and their keys (HMI, section 3.3.1).

Ids are raised by one, so that 0 stands for "no neighbour" whatever a tokenizer's padding is. An n-gram with zeros is
that of a text's edge, and the same n-gram is what a longer one falls back to: its missing neighbours are not attended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped

from jpets.errors import InvalidInput

TOKEN_BITS = 21
"""Three ids, raised by one, fit in a signed 64-bit integer."""
MOST_IDS = (1 << TOKEN_BITS) - 1
"""Ids of a vocabulary whose n-grams have keys."""
HALF = 3
"""Tokens of a 64-bit half of a key."""
LONG = np.dtype("S16")
"""Keys of more than three tokens: two halves in big-endian order, so that bytes sort as numbers do."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The tokens of an n-gram: so many ``before`` a token, itself, and so many ``after`` it.

    A token's vector is a sum over the n-grams that contain it; for ``causal`` models over those that end before or at
    it, which is one (HMI, section 3.2.1).
    """

    before: int
    after: int
    causal: bool = False

    @classmethod
    def of(cls, size: int, *, causal: bool = False) -> Window:
        """The window of ``size`` tokens: for causal models it ends at its token, otherwise the token is in its middle,
        or its last where ``size`` is 2.

        Raises ``InvalidInput`` for other sizes than 2, 3 and 5.
        """
        if size not in (2, 3, 5):
            raise InvalidInput(f"an n-gram must have 2, 3 or 5 tokens, found {size}")
        if causal or size == 2:
            return cls(size - 1, 0, causal)
        return cls(size // 2, size // 2)

    @property
    def size(self) -> int:
        return self.before + 1 + self.after

    @property
    def places(self) -> Sequence[int]:
        """The places of an n-gram that have vectors: all, or of a causal one that of its token."""
        return [self.before] if self.causal else range(self.size)

    @property
    def key_dtype(self) -> np.dtype[np.void] | np.dtype[np.int64] | np.dtype[np.bytes_]:
        return np.dtype(np.int64) if self.size <= HALF else LONG

    @property
    def shorter(self) -> Sequence[tuple[int, int]]:
        """The windows (before, after) that a missing n-gram falls back to, the longest first, the token alone last.

        One neighbour is dropped at a time, the farthest, and of two that are equally far the one before: of
        (i-1, i, i+1) stay (i, i+1), then (i).
        """
        found, (before, after) = [], (self.before, self.after)
        while before or after:
            before, after = (before - 1, after) if before >= after else (before, after - 1)
            found.append((before, after))
        return found

    @property
    def level_names(self) -> Sequence[str]:
        """What each level of a look-up is called (``Found.level``): the tables, then the tokens that are left."""
        return ["domain", "root", *(f"{before + 1 + after}-gram" for before, after in self.shorter)]


def ngrams(
    ids: Int[np.ndarray, " t"], text_of_token: Int[np.ndarray, " t"] | None, window: Window
) -> Int[np.ndarray, "t n"]:
    """The n-gram of each token of packed texts, as raised ids; none crosses from one text into another. Without
    ``text_of_token`` all tokens are of one text."""
    count = len(ids)
    raised = np.zeros(count + window.size - 1, np.int64)
    own_ids = raised[window.before : window.before + count]
    own_ids[:] = ids
    own_ids += 1
    found = np.empty((count, window.size), np.int64)
    for place in range(window.size):
        found[:, place] = raised[place : place + count]
    if text_of_token is None:
        return found
    for place, offset in enumerate(range(-window.before, window.after + 1)):
        own = slice(max(0, -offset), max(0, count - max(0, offset)))
        other = slice(max(0, offset), max(0, count + min(0, offset)))
        found[own, place] *= text_of_token[own] == text_of_token[other]
    return found


def shortened(grams: Int[np.ndarray, "t n"], window: Window, before: int, after: int) -> Int[np.ndarray, "t n"]:
    """The n-grams with only so many neighbours before and after the token."""
    kept = np.zeros_like(grams)
    span = slice(window.before - before, window.before + after + 1)
    kept[:, span] = grams[:, span]
    return kept


def alone(words: int, window: Window, forms: Int[np.ndarray, " w"] | None = None) -> Int[np.ndarray, "k n"]:
    """The n-gram of each token of a vocabulary of ``words`` ids without neighbours; with ``forms``, a map of raised
    ids (``jpets.plot.forms``), of each normal form."""
    raised = np.arange(1, words + 1) if forms is None else np.unique(forms[1:])
    found = np.zeros((len(raised), window.size), np.int64)
    found[:, window.before] = raised
    return found


def keys_of(grams: Int[np.ndarray, "t n"]) -> Shaped[np.ndarray, " t"]:
    """Keys that are equal where n-grams are, and sort as they do: 64-bit integers up to three tokens, else ``LONG``."""
    halves = [grams[:, -HALF:]] if grams.shape[1] <= HALF else [grams[:, :-HALF], grams[:, -HALF:]]
    packed = [_packed(half) for half in halves]
    if len(packed) == 1:
        return packed[0]
    return np.ascontiguousarray(np.stack(packed, 1).astype(">i8")).view(LONG)[:, 0]


def grams_of(keys: Shaped[np.ndarray, " t"], size: int) -> Int[np.ndarray, "t n"]:
    """The n-grams of keys: the inverse of ``keys_of``."""
    if size <= HALF:
        return _unpacked(keys, size)
    halves = np.ascontiguousarray(keys).view(">i8").reshape(-1, 2).astype(np.int64)
    return np.concatenate([_unpacked(halves[:, 0], size - HALF), _unpacked(halves[:, 1], HALF)], 1)


def _packed(half: Int[np.ndarray, "t h"]) -> Int[np.ndarray, " t"]:
    packed = np.zeros(len(half), np.int64)
    for column in half.T:
        packed = packed << TOKEN_BITS | column
    return packed


def _unpacked(packed: Int[np.ndarray, " t"], size: int) -> Int[np.ndarray, "t h"]:
    shifts = TOKEN_BITS * np.arange(size - 1, -1, -1)
    return packed[:, None] >> shifts & MOST_IDS
