"""Texts with masks, and the words that may stand in their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from jpets.errors import InvalidInput

FloatArray = npt.NDArray[np.float32]
MASKS = ("[MASK]", "<mask>")
MOST_MASKS = 64
"""Of a text: each is compared with all tokens' vectors."""


class Vocabulary:
    """A backbone's tokens: what they spell, and their vectors ``words`` [V, e]; ``epsilon`` is that of its norms. The
    ``tokenizer`` cuts and pads nothing. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, words: npt.NDArray[np.floating], epsilon: float) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self.epsilon = epsilon
        known = ((token, self._tokenizer.token_to_id(token)) for token in MASKS)
        self.mask, self._mask_id = next(((token, id) for token, id in known if id is not None), (MASKS[0], -1))

    @cached_property
    def words(self) -> FloatArray:
        return np.asarray(self._words, np.float32)

    def masked(self, ids: npt.NDArray[np.int32]) -> Masked:
        """A text of token ``ids``. Raises ``InvalidInput`` where none of them is a mask, or too many are."""
        places = np.flatnonzero(ids == self._mask_id)
        if not len(places):
            raise InvalidInput(f"the task fills masks, the text's tokens hold none; write {self.mask} for a word")
        if len(places) > MOST_MASKS:
            raise InvalidInput(f"the text has {len(places)} masks, at most {MOST_MASKS} are filled; send it in parts")
        return Masked(ids, places, self)

    def spelled(self, ids: Sequence[int], *, special: bool = True) -> str:
        """The text of tokens, with special ones or without."""
        return self._tokenizer.decode([*ids], skip_special_tokens=not special)

    def token(self, text: str) -> int:
        """The token that is ``text``, or that it begins with. Raises ``InvalidInput``."""
        if (whole := self._tokenizer.token_to_id(text)) is not None:
            return int(whole)
        begins = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not begins:
            raise InvalidInput(f"targets: expected words, found {text[:40]!r}, which has no token")
        return int(begins[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Masked:
    """A text's token ``ids`` [tokens], special ones included, and the ``places`` [masks] of its masks."""

    ids: npt.NDArray[np.int32]
    places: npt.NDArray[np.intp]
    vocabulary: Vocabulary
