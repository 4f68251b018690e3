"""Texts as tokens: no more of them than are kept, and cut where they are too long."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from tokenizers import Encoding, Tokenizer

from jpets.cuts import Cuts
from jpets.errors import InputTooLong, InvalidInput
from jpets.types import Side, TruncationStrategy

SHORT = 2048
"""Texts of up to so many characters are tokenised whole, however few of their tokens are needed."""
LETTERS = 8
"""Characters for each token that is needed, at first: more than most texts have."""
MOST_WHOLE = 1 << 20
"""Characters of a text that are tokenised as a whole where there is no place to cut: they take a hundred times as many
bytes."""
PIECE = 1 << 16
"""Characters that are counted at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The part of a text that its tokens stand for: ``text``, which begins at character ``start`` of the whole."""

    tokens: Encoding
    text: str
    start: int = 0
    whole: bool = True


class Cutter:
    """Tokenises texts and cuts them, where nothing else is said on their ``side``. Thread-safe: the tokenizer is only
    read."""

    def __init__(self, tokenizer: Tokenizer, side: Side) -> None:
        self._tokenizer, self.side = tokenizer, side
        self._cuts = Cuts(json.loads(tokenizer.to_str()))

    def tokenize(self, text: str) -> Encoding:
        """All tokens of a text, without special ones."""
        if len(text) <= SHORT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # which other threads can run beside
        return found

    def cut(
        self, text: str, pair: str | None, limit: int, strategy: TruncationStrategy | None, side: Side | None = None
    ) -> tuple[Part, Part | None]:
        """The tokens of both texts without special tokens; with these they are at most ``limit``. Without a
        ``strategy`` nothing is cut.

        Raises ``InputTooLong`` where that is too much and the strategy does not help, ``InvalidInput`` for what is no
        Unicode.
        """
        side = side or self.side
        extra = self._tokenizer.num_special_tokens_to_add(pair is not None)
        room = max(0, limit - extra)
        try:
            first = self._bounded(text, room, side)
            second = self._bounded(pair, room, side) if pair is not None else None
        except (TypeError, UnicodeError) as error:  # a lone surrogate, or no string at all
            raise InvalidInput("the text is not valid Unicode") from error
        parts = [part for part in (first, second) if part is not None]
        found = extra + sum(len(part.tokens) for part in parts)
        if found <= limit:
            return first, second
        if not room:
            raise InputTooLong(f"the limit of {limit} tokens leaves no room beside {extra} special tokens")
        if strategy is None:
            more = "" if all(part.whole for part in parts) else "more than "
            found = found if not more else limit
            raise InputTooLong(
                f"the text has {more}{found} tokens, the limit is {limit}; shorten it or ask for truncation"
            )
        a, b = len(first.tokens), None if second is None else len(second.tokens)
        if strategy != "longest_first":
            kept = only_one(a, b, room, strategy)
        elif pair is not None and min(a, b or 0) > room and not all(part.whole for part in parts):
            kept = longest_first(room + 1 + self._is_longer(text, pair), room + 1, room)  # it gets the odd token
        else:
            kept = longest_first(a, b or 0, room)
        for part, count in zip(parts, kept, strict=False):
            part.tokens.truncate(count, direction=side)
        return first, second

    def _bounded(self, text: str, room: int, side: Side) -> Part:
        """All tokens of a text; or more than ``room`` of them, from the end of the text that stays when it is cut.

        A long text is tokenised in part where it can be: it may have thousands of times the tokens that are needed.
        """
        size = max(SHORT, LETTERS * room)
        while size < len(text):
            at = self._cuts.before(text, size) if side == "right" else self._cuts.after(text, len(text) - size)
            if 0 < at < len(text):
                part, start = (text[:at], 0) if side == "right" else (text[at:], at)
                tokens = self.tokenize(part)
                if len(tokens) > room:
                    return Part(tokens, part, start, False)
            size *= 4
        if len(text) > MOST_WHOLE:
            raise InputTooLong(
                f"the text has {len(text)} characters and no place to cut it, such as a space, where its tokens are "
                f"kept; at most {MOST_WHOLE} are read at once: shorten it"
            )
        return Part(self.tokenize(text), text)

    def _is_longer(self, text: str, other: str) -> bool:
        """Whether a text has more tokens than another one, counted no further than it takes."""
        own, others = self._counts(text), self._counts(other)
        count: int | None = 0
        beside: int | None = 0
        while count is not None and beside is not None:
            if count <= beside:
                count = next(own, None)
            else:
                beside = next(others, None)
        return beside is None

    def _counts(self, text: str) -> Iterator[int]:
        """The number of tokens up to more and more of a text."""
        start = total = 0
        while start < len(text):
            end = self._cuts.after(text, start + PIECE)
            total += len(self.tokenize(text[start:end]))
            yield total
            start = end


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept where ``room`` are left: what Hugging Face's tokenizers keep.

    The shorter text stays whole while it has less than half; else both get half, the longer one the odd token.
    """
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    if short > room or short + max(short, room - short) > room:
        short, long = room // 2, room - room // 2
    else:
        long = max(short, room - short)
    return (long, short) if first > second else (short, long)


def only_one(first: int, second: int | None, room: int, strategy: TruncationStrategy) -> tuple[int, int]:
    """How many tokens of two texts that are too long are kept where ``only_first`` or ``only_second`` is cut: what
    Hugging Face's tokenizers keep. ``second`` is None for a text alone.

    Raises ``InputTooLong`` where there is no such text, or no token of it would be left.
    """
    if strategy == "only_second" and second is None:
        raise InputTooLong("one text is too long, and only a pair's second one is cut (only_second); shorten it")
    whole, cut = (second or 0, "first") if strategy == "only_first" else (first, "second")
    if whole >= room:
        raise InputTooLong(
            f"a pair is too long, and its other text leaves no room for a token of the {cut} one, which alone is cut "
            f"({strategy}): {room} tokens are left beside special ones; shorten it"
        )
    return (room - whole, whole) if strategy == "only_first" else (whole, room - whole)
