"""Texts to token ids, by the backbone's own tokenizer and the task's preprocessing."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from jpets.cuts import Cuts
from jpets.errors import InputTooLong, InvalidInput
from jpets.passage import Context, Passage, passage_of_ids, passage_of_text, trimmed
from jpets.positions import text_positions
from jpets.types import LoadedBackbone, Preprocessing, Query, RowSource

Ints = npt.NDArray[np.int32]
HOLES = re.compile(r"\{text(?:_pair)?\}")
"""Where a template takes texts."""
_Place = tuple[int, int, int]
"""First and last character of a text, and its number."""
SHORT = 2048
"""Texts of up to so many characters are tokenised whole, however few of their tokens are needed."""
LETTERS = 8
"""Characters for each token that is needed, at first: more than most texts have."""
MOST_WHOLE = 1 << 20
"""Characters of a text that are tokenised as a whole where there is no place to cut: they take a hundred times as many
bytes."""
NO_ROW = -1
"""The row of a place without a token, in tables."""
PIECE = 1 << 16
"""Characters that are counted at a time."""


class Tokens(NamedTuple):
    ids: Ints
    types: Ints
    passage: Passage | None = None
    of_text: npt.NDArray[np.int8] | None = None
    """As in ``jpets.types.Tokens``."""
    places: Ints | None = None
    """Positions, where the text has tokens that take none (``text_positions``)."""
    levels: npt.NDArray[np.int8] | None = None
    """How much of each token's n-gram a table will hold, of texts that make one (``jpets.plot.lookup.levels_of``)."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """The part of a text that its tokens stand for: ``text``, which begins at character ``start`` of the whole."""

    tokens: Encoding
    text: str
    start: int = 0
    whole: bool = True


class TextEncoder:
    """Thread-safe: the tokenizer is only read. ``longest`` is the most tokens the model takes; texts are cut to
    ``usual_length`` where that is set and their task has no length of its own."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        type_vocab_size: int,
        longest: int,
        usual_length: int = 0,
        *,
        skipped: tuple[int, int] | None = None,
        tables: RowSource | None = None,
    ) -> None:
        """``skipped`` is a token that takes no position, and the position that stands for its own. With ``tables`` the
        ids of tokens are their rows there."""
        document = json.loads(tokenizer_json)
        self._side = str((document.get("truncation") or {}).get("direction", "Right")).lower()
        document["truncation"] = document["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self._cuts = Cuts(json.loads(self._tokenizer.to_str()))
        self._vocab_size = vocab_size
        self._type_limit = max(1, type_vocab_size)
        self.longest = longest
        self._usual = usual_length or longest
        found = [self._tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>")]
        pads = [id for id in found if id is not None]
        self._skipped, self._tables = skipped, tables
        self.pad_id: int = next(iter(pads), 0) if tables is None else NO_ROW
        nothing = self._tokenizer.encode("", add_special_tokens=False)
        self._special = np.array([*self._tokenizer.post_process(nothing, nothing, True).ids, *pads], np.int32)
        """The tokens around texts."""

    @classmethod
    def of(cls, backbone: LoadedBackbone) -> Self:
        """For texts as long as the backbone takes."""
        return cls.for_length(backbone, backbone.config.max_positions)

    @classmethod
    def for_length(cls, backbone: LoadedBackbone, longest: int) -> Self:
        """For texts of at most ``longest`` tokens."""
        config, text = backbone.config, backbone.tokenizer_json
        skipped = (config.padding_id, config.max_positions) if config.skips_padding else None
        own = backbone.tables
        return cls(
            text,
            config.vocab_size,
            config.type_vocab_size,
            longest,
            config.usual_length,
            skipped=skipped,
            tables=own,
        )

    def encode(
        self,
        query: Query,
        rule: Preprocessing,
        longest: int | None = None,
        *,
        passage: bool = False,
        of_text: bool = False,
    ) -> Tokens:
        """Token and type ids of a query, special tokens included, at most ``longest`` (the model's limit) of them; with
        tables rows in those of the rule's domain instead of token ids.

        With ``passage`` also where an answer to its question may stand: in the second text of a pair (of a template
        where ``{text_pair}`` stands first), in all of a single text but the task's prefix or what its template sets
        around it. Token ids are a pair where special tokens divide them (``passage_of_ids``). With ``of_text`` also
        which tokens are of the query's texts; of token ids those that are not special.

        Raises ``InputTooLong`` where truncation was not asked for, ``InvalidInput`` for an empty or malformed query,
        and where a question's context has no tokens.
        """
        longest = longest or self.longest
        if (query.text is None) == (query.input_ids is None):
            raise InvalidInput("a query needs either text or input_ids, and not both")
        if query.input_ids is not None:
            tokens = self._check_ids(query, min(longest, rule.max_length or longest))
            own = np.where(np.isin(tokens.ids, self._special), -1, 0).astype(np.int8) if of_text else None
            place = passage_of_ids(tokens.ids, self._special) if passage else None
            return self._looked_up(tokens._replace(passage=place, of_text=own), rule.domain)
        assert query.text is not None
        texts = self._prepare(query.text, query.text_pair, rule)
        truncate = rule.truncation if query.truncate is None else query.truncate
        limit = min(longest, rule.max_length or (self._usual if truncate else longest))
        first, second = self._cut(*texts, limit, truncate=truncate)
        whole: Encoding = self._tokenizer.post_process(first.tokens, second.tokens if second else None, True)
        types = np.array(whole.type_ids, np.int32) % self._type_limit
        tokens = Tokens(np.array(whole.ids, np.int32), types)
        if passage:
            context = _context(query.text, query.text_pair, rule)
            held = second if second is not None and context.sequence else first
            context = context._replace(first=context.first - held.start)
            tokens = tokens._replace(passage=passage_of_text(context, held.text, held.tokens, whole))
        if of_text:
            tokens = tokens._replace(of_text=_owners(whole, first, query, rule))
        return self._looked_up(tokens, rule.domain)

    def _looked_up(self, tokens: Tokens, domain: str | None) -> Tokens:
        if self._skipped is not None and (tokens.ids == self._skipped[0]).any():
            tokens = tokens._replace(places=text_positions(tokens.ids, *self._skipped))
        if self._tables is None:
            return tokens
        return tokens._replace(ids=self._tables.rows(tokens.ids, domain))

    def _prepare(self, text: str, pair: str | None, rule: Preprocessing) -> tuple[str, str | None]:
        if not text.strip():
            raise InvalidInput("the text is empty; send at least one character that is not white space")
        if rule.template is not None:
            return _filled(rule.template, text, pair), None
        return (rule.prefix or "") + text, pair

    def _cut(self, text: str, pair: str | None, limit: int, *, truncate: bool) -> tuple[_Part, _Part | None]:
        """The tokens of both texts without special tokens; with these they are at most ``limit``."""
        extra = self._tokenizer.num_special_tokens_to_add(pair is not None)
        room = max(0, limit - extra)
        try:
            first = self._bounded(text, room)
            second = self._bounded(pair, room) if pair is not None else None
        except (TypeError, UnicodeError) as error:  # a lone surrogate, or no string at all
            raise InvalidInput("the text is not valid Unicode") from error
        parts = [part for part in (first, second) if part is not None]
        found = extra + sum(len(part.tokens) for part in parts)
        if found <= limit:
            return first, second
        if not room:
            raise InputTooLong(f"the limit of {limit} tokens leaves no room beside {extra} special tokens")
        if not truncate:
            more = "" if all(part.whole for part in parts) else "more than "
            found = found if not more else limit
            raise InputTooLong(
                f"the text has {more}{found} tokens, the limit is {limit}; shorten it or ask for truncation"
            )
        a, b = len(first.tokens), len(second.tokens) if second else 0
        if pair is not None and min(a, b) > room and not all(part.whole for part in parts):
            a, b = room + 1 + self._is_longer(text, pair), room + 1  # the longer one gets the odd token
        for part, kept in zip(parts, longest_first(a, b, room), strict=False):
            part.tokens.truncate(kept, direction=self._side)
        return first, second

    def _bounded(self, text: str, room: int) -> _Part:
        """All tokens of a text; or more than ``room`` of them, from the end of the text that stays when it is cut.

        A long text is tokenised in part where it can be: it may have thousands of times the tokens that are needed.
        """
        size = max(SHORT, LETTERS * room)
        while size < len(text):
            at = self._cuts.before(text, size) if self._side == "right" else self._cuts.after(text, len(text) - size)
            if 0 < at < len(text):
                part, start = (text[:at], 0) if self._side == "right" else (text[at:], at)
                tokens = self._tokenize(part)
                if len(tokens) > room:
                    return _Part(tokens, part, start, False)
            size *= 4
        if len(text) > MOST_WHOLE:
            raise InputTooLong(
                f"the text has {len(text)} characters and no place to cut it, such as a space, where its tokens are "
                f"kept; at most {MOST_WHOLE} are read at once: shorten it"
            )
        return _Part(self._tokenize(text), text)

    def _tokenize(self, text: str) -> Encoding:
        if len(text) <= SHORT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # which other threads can run beside
        return found

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
            total += len(self._tokenize(text[start:end]))
            yield total
            start = end

    def _check_ids(self, query: Query, limit: int) -> Tokens:
        ids = _flat_integers("input_ids", query.input_ids)
        types = np.zeros_like(ids)
        if query.token_type_ids is not None:
            types = _flat_integers("token_type_ids", query.token_type_ids)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InvalidInput(f"input_ids must lie in 0..{self._vocab_size - 1}, found {ids.min()}..{ids.max()}")
        if types.shape != ids.shape or types.min() < 0 or types.max() >= self._type_limit:
            raise InvalidInput(f"token_type_ids must be as many as input_ids and lie in 0..{self._type_limit - 1}")
        if len(ids) > limit:
            raise InputTooLong(f"input_ids holds {len(ids)} tokens, the limit is {limit}; ids are never truncated")
        return Tokens(ids.astype(np.int32), types.astype(np.int32))


def _filled(template: str, text: str, pair: str | None) -> str:
    parts = {"{text}": text, "{text_pair}": pair or ""}
    return HOLES.sub(lambda found: parts[found[0]], template)


def _context(text: str, pair: str | None, rule: Preprocessing) -> Context:
    """Where ``_prepare`` puts the context of a question."""
    if rule.template is None:
        return Context(0, len(rule.prefix or ""), text) if pair is None else Context(1, 0, pair)
    place, found = ("{text}", text) if pair is None or "{text_pair}" not in rule.template else ("{text_pair}", pair)
    return Context(0, len(_filled(rule.template.partition(place)[0], text, pair)), found)


def _flat_integers(name: str, values: object) -> npt.NDArray[np.integer]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # ragged, or beyond 64 bits
        array = np.empty(0)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise InvalidInput(f"{name} must be a non-empty flat sequence of integers")
    return array


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


def _places(text: str, pair: str | None, rule: Preprocessing) -> Iterator[_Place]:
    """Where ``_prepare`` puts the query's texts, in the first of what it gives."""
    if rule.template is None:
        at = len(rule.prefix or "")
        yield at, at + len(text), 0
        return
    at = read = 0
    for hole in HOLES.finditer(rule.template):
        own, number = (text, 0) if hole[0] == "{text}" else (pair or "", 1)
        at += hole.start() - read
        yield at, at + len(own), number
        at, read = at + len(own), hole.end()


def _owners(whole: Encoding, part: _Part, query: Query, rule: Preprocessing) -> npt.NDArray[np.int8]:
    """``Tokens.of_text`` of a query whose first text, as it is tokenised, is ``part``. A token that reaches out of a
    text belongs to none."""
    owners = np.array(whole.special_tokens_mask, np.int8)  # its sequence_ids forget the first text of some pairs
    ordinary = np.flatnonzero(owners == 0)
    owners = -owners
    owners[ordinary[len(part.tokens) :]] = 1
    if rule.template is None and not rule.prefix:
        return owners
    assert query.text is not None
    places = list(_places(query.text, query.text_pair, rule))
    found = []
    for begin, end in part.tokens.offsets:
        a, b = (at + part.start for at in trimmed(part.text, begin, end))
        found.append(next((number for first, last, number in places if first <= a and b <= last), -1))
    owners[owners == 0] = found
    return owners
