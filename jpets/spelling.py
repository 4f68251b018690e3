"""Where a query's labelled tokens stand in its texts, and how they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """Of each token of a query that came as texts.

    ``offsets`` [tokens, 2] are its characters in its own text, end exclusive; ``pieces`` the words of the vocabulary,
    or what stands in the text for one that the vocabulary lacks; ``inside`` [tokens] says whether it goes on with the
    word of the token before, as ``transformers`` finds words. ``joined`` makes text of pieces.
    """

    texts: tuple[str, ...]
    offsets: npt.NDArray[np.int32]
    pieces: Sequence[str]
    inside: npt.NDArray[np.bool_]
    joined: Callable[[Sequence[str]], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Spelling:
    """``of_text`` [tokens]: the text that each token is of, 0 or 1 of a pair; -1 for special tokens and what the task's
    prefix or template sets around texts. ``written`` is None where the query came as token ids."""

    of_text: npt.NDArray[np.int8]
    written: Written | None = None

    def reach(self) -> tuple[int, int] | None:
        """The characters of the first text, of a query that came as texts, from its first token to its last; None where
        no token is of it."""
        assert self.written is not None
        own = self.written.offsets[self.of_text == 0]
        return (int(own[:, 0].min()), int(own[:, 1].max())) if len(own) else None
