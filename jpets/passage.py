"""Where in a query's tokens the answer to its question may stand, and which text that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from jpets.errors import InvalidInput
from jpets.types import Answer

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class Passage:
    """The context among a query's tokens: ``start`` to ``end``, exclusive, at least one.

    ``offsets`` [end - start, 2] are the characters of ``text`` that each of its tokens stands for; a query of token ids
    has neither. ``words`` are those of the word that each token is of, as the tokenizer divides text into words; None
    where it does not.
    """

    start: int
    end: int
    null: bool
    """Whether the query begins with a special token, on which a model puts what it does not find in the context."""
    text: str | None = None
    offsets: Ints | None = None
    words: Ints | None = None

    @property
    def place(self) -> tuple[int, int, bool]:
        """All that decides which tokens are the answer."""
        return self.start, self.end, self.null

    def answer(self, start: int, end: int, *, whole_words: bool = False) -> Answer | None:
        """The text of tokens ``start`` to ``end``, exclusive, of the query, or that of their words; None where only ids
        are known."""
        if self.text is None or self.offsets is None:
            return None
        own = self.words if whole_words and self.words is not None else self.offsets
        first, last = int(own[start - self.start, 0]), int(own[end - 1 - self.start, 1])
        return Answer(self.text[first:last], first, last)


class Context(NamedTuple):
    """A context in what is tokenised: in text number ``sequence`` (0 or 1), from its character ``first`` on."""

    sequence: int
    first: int
    text: str


def passage_of_text(context: Context, text: str, tokens: Encoding, whole: Encoding) -> Passage:
    """The passage in ``whole``, the tokens of both texts; ``tokens`` are those of ``text``, which holds the context.

    Offsets are those of ``tokens``: some tokenizers trim them again whenever texts are put together. White space
    belongs to no token, though some tokenizers count it to the next word. Tokens that reach beyond the context do not
    count; special tokens that it spells out do. Raises ``InvalidInput`` where none is left.
    """
    offsets = [trimmed(text, begin, end) for begin, end in tokens.offsets]
    first, last = context.first, context.first + len(context.text)
    inside = [at for at, (begin, end) in enumerate(offsets) if first <= begin < end <= last]
    if not inside:
        raise InvalidInput(
            "no token of the context is left to answer with; send a context that is not empty (text_pair, beside the "
            "question as text), or a shorter question"
        )
    kept = slice(inside[0], inside[-1] + 1)
    characters = np.array(offsets[kept], np.int32) - np.int32(first)
    start, null = whole.sequence_ids.index(context.sequence) + inside[0], whole.sequence_ids[0] is None
    words = _words(characters, tokens.word_ids[kept])
    return Passage(start, start + len(characters), null, context.text, characters, words)


def _words(characters: Ints, numbers: Sequence[int | None]) -> Ints | None:
    """Of each token the characters from the begin of its word to the end, as far as the context has it."""
    if None in numbers:
        return None
    of = np.array(numbers, np.int64)
    begins = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
    ends = np.append(begins[1:], len(of)) - 1
    each = np.searchsorted(begins, np.arange(len(of)), side="right") - 1
    return np.stack([characters[begins[each], 0], characters[ends[each], 1]], axis=1)


def trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    """Where ``text[begin:end]`` stands without white space around it."""
    piece = text[begin:end]
    end -= len(piece) - len(piece.rstrip())
    return min(begin + len(piece) - len(piece.lstrip()), end), end


def passage_of_ids(ids: Ints, special: Ints) -> Passage:
    """The second run of ids that are not ``special``, or the only one: question, separator, context.

    Raises ``InvalidInput`` where there is none.
    """
    ordinary = np.pad(~np.isin(ids, special), 1).astype(np.int8)
    runs = np.flatnonzero(np.diff(ordinary)).reshape(-1, 2)
    if not len(runs):
        raise InvalidInput("input_ids holds special tokens only; send those of a question and of its context")
    start, stop = runs[min(1, len(runs) - 1)]
    return Passage(int(start), int(stop), bool(np.isin(ids[0], special)))
