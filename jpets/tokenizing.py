"""Texts to token ids, by the backbone's own tokenizer and the task's preprocessing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from jpets.errors import InputTooLong, InvalidInput, TooLarge
from jpets.passage import Passage, passage_of_ids, passage_of_text, trimmed
from jpets.positions import text_positions
from jpets.spelling import Spelling, Written
from jpets.templates import context_of, places_of, prepared, prompted
from jpets.truncation import MOST_WHOLE, Cutter, Part
from jpets.types import LoadedBackbone, OpenTables, Preprocessing, Query, RowSource, Side

Ints = npt.NDArray[np.int32]
NO_ROW = -1
"""The row of a place without a token, in tables."""


class Tokens(NamedTuple):
    ids: Ints
    types: Ints
    passage: Passage | None = None
    spelling: Spelling | None = None
    """Of texts whose tokens get labels."""
    places: Ints | None = None
    """Positions, where the text has tokens that take none (``text_positions``)."""
    levels: npt.NDArray[np.int8] | None = None
    """How much of each token's n-gram a table will hold, of texts that make one (``jpets.plot.lookup.levels_of``)."""


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
        ids of tokens are their rows there, which stay what they are while the encoder is used."""
        document = json.loads(tokenizer_json)
        direction = (document.get("truncation") or {}).get("direction")
        document["truncation"] = document["padding"] = None
        self.tokenizer = Tokenizer.from_str(json.dumps(document))
        self._cutter = Cutter(self.tokenizer, "left" if direction == "Left" else "right")
        self._marks_inside = bool(document["model"].get("continuing_subword_prefix"))
        """Whether a word of the vocabulary says that it goes on with the one before."""
        self._unknown = _unknown_id(document["model"])
        self._vocab_size = vocab_size
        self._type_limit = max(1, type_vocab_size)
        self.longest = longest
        self._usual = usual_length or longest
        found = [self.tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>")]
        pads = [id for id in found if id is not None]
        self._skipped, self._tables, self._opened = skipped, tables, set[OpenTables]()
        self.pad_id: int = next(iter(pads), 0) if tables is None else NO_ROW
        nothing = self.tokenizer.encode("", add_special_tokens=False)
        self._special = np.array([*self.tokenizer.post_process(nothing, nothing, True).ids, *pads], np.int32)
        """The tokens around texts."""

    @property
    def side(self) -> Side:
        """On which texts that are too long are cut."""
        return self._cutter.side

    @classmethod
    def of(cls, backbone: LoadedBackbone, *, looked_up: bool = True) -> Self:
        """For texts as long as the backbone takes. Not ``looked_up``: tokens, also where the backbone has tables."""
        return cls.for_length(backbone, backbone.config.max_positions, looked_up=looked_up)

    @classmethod
    def for_length(cls, backbone: LoadedBackbone, longest: int, *, looked_up: bool = True) -> Self:
        """For texts of at most ``longest`` tokens."""
        config, text = backbone.config, backbone.tokenizer_json
        skipped = (config.padding_id, config.max_positions) if config.skips_padding else None
        own = backbone.tables if looked_up else None
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
        spelled: bool = False,
    ) -> Tokens:
        """Token and type ids of a query, special tokens included, at most ``longest`` (the model's limit) of them; with
        tables rows in those of the rule's domain instead of token ids.

        With ``passage`` also where an answer to its question may stand: in the second text of a pair (of a template
        where ``{text_pair}`` stands first), in all of a single text but the task's prefix or what its template sets
        around it. Token ids are a pair where special tokens divide them (``passage_of_ids``). With ``spelled`` also
        where tokens stand in the query's texts; of token ids those that are not special are of them.

        Raises ``InputTooLong`` where truncation was not asked for, or is not enough, ``InvalidInput`` for an empty or
        malformed query, and where a question's context has no tokens.
        """
        longest = longest or self.longest
        if (query.text is None) == (query.input_ids is None):
            raise InvalidInput("a query needs either text or input_ids, and not both")
        rule = _bounded(prompted(rule, query), query, longest)
        if query.input_ids is not None:
            tokens = self._check_ids(query, min(longest, rule.max_length or longest))
            if passage:
                tokens = tokens._replace(passage=passage_of_ids(tokens.ids, self._special))
            if spelled:
                own = np.where(np.isin(tokens.ids, self._special), -1, 0).astype(np.int8)
                tokens = tokens._replace(spelling=Spelling(own))
            return self._looked_up(tokens, rule.domain)
        assert query.text is not None
        texts = prepared(query.text, query.text_pair, rule)
        truncate = rule.truncation if query.truncate is None else query.truncate
        limit = min(longest, rule.max_length or (self._usual if truncate else longest))
        side = truncate if isinstance(truncate, str) else None
        first, second = self._cutter.cut(*texts, limit, rule.truncation_strategy if truncate else None, side)
        whole: Encoding = self.tokenizer.post_process(first.tokens, second.tokens if second else None, True)
        tokens = self._tokens(whole, rule)
        if passage:
            context = context_of(query.text, query.text_pair, rule)
            held = second if second is not None and context.sequence else first
            context = context._replace(first=context.first - held.start)
            tokens = tokens._replace(passage=passage_of_text(context, held.text, held.tokens, whole))
        if spelled:
            tokens = tokens._replace(spelling=self._spelling(whole, first, second, query, rule))
        return self._looked_up(tokens, rule.domain)

    def windows(
        self, query: Query, rule: Preprocessing, limit: int, stride: int, *, passage: bool = False, most: int = 1024
    ) -> list[Tokens]:
        """The tokens of a text, or of a pair's second text behind the whole first one, in as many windows of ``limit``
        tokens as it takes; neighbours have ``stride`` tokens in common. With ``passage`` where an answer may stand, and
        no window of white space alone, else how tokens are spelled.

        Raises ``InvalidInput`` for an empty text and for rules that set something around it, ``InputTooLong`` where
        the first text leaves no room, ``TooLarge`` for more than ``most`` windows.
        """
        assert query.text is not None
        rule = prompted(rule, query)
        if rule.template is not None or (rule.prefix and query.text_pair is None):
            raise InvalidInput("a long text is read in windows only where the task's rule sets nothing around it")
        text, pair = prepared(query.text, query.text_pair, rule)
        if max(len(text), len(pair or "")) > MOST_WHOLE:
            raise InputTooLong(f"a text has more than {MOST_WHOLE} characters, which are read at once; shorten it")
        try:
            parts = [Part(self._cutter.tokenize(each), each) for each in (text, pair) if each is not None]
        except (TypeError, UnicodeError) as error:
            raise InvalidInput("the text is not valid Unicode") from error
        taken = self.tokenizer.num_special_tokens_to_add(pair is not None) + sum(len(own.tokens) for own in parts[:-1])
        room = limit - taken
        *before, last = parts
        whole_fits = 0 < len(last.tokens) <= room
        if room <= stride and not whole_fits:
            raise InputTooLong(
                f"windows of {limit} tokens leave room for {max(0, room)} of the text, and neighbours share {stride}: "
                "take larger windows or a shorter first text"
            )
        count = 1 if whole_fits else 1 + max(0, -(-(len(last.tokens) - room) // (room - stride)))
        if count > most:
            raise TooLarge(f"a text makes {count} windows, the limit is {most} more; shorten it, or send fewer texts")
        if not whole_fits:
            last.tokens.truncate(room, stride=stride)
        found, pieces = [], [last.tokens, *last.tokens.overflowing]
        if passage:  # no answer stands in white space
            pieces = [each for each in pieces if any(last.text[b:e].strip() for b, e in each.offsets)] or pieces[:1]
        for piece in pieces:
            own = dataclasses.replace(last, tokens=piece)
            first, second = (before[0], own) if before else (own, None)
            whole = self.tokenizer.post_process(first.tokens, second.tokens if second else None, True)
            tokens = self._tokens(whole, rule)
            if passage:
                place = passage_of_text(context_of(query.text, query.text_pair, rule), own.text, own.tokens, whole)
                found.append(tokens._replace(passage=place))
            else:
                found.append(tokens._replace(spelling=self._spelling(whole, first, second, query, rule)))
        return found

    def _tokens(self, whole: Encoding, rule: Preprocessing) -> Tokens:
        types = np.array(whole.type_ids, np.int32) % (1 if rule.one_type else self._type_limit)
        return Tokens(np.array(whole.ids, np.int32), types)

    def _spelling(
        self, whole: Encoding, first: Part, second: Part | None, query: Query, rule: Preprocessing
    ) -> Spelling:
        """Of ``whole``, the tokens of both texts as they are tokenised. Offsets are those of each alone: some
        tokenizers trim them again whenever texts are put together."""
        owners = _owners(whole, first, query, rule)
        assert query.text is not None
        texts = (query.text,) if query.text_pair is None else (query.text, query.text_pair)
        begins = {number: at for at, _, number in places_of(query.text, query.text_pair, rule)}
        parts = [first] if second is None else [first, second]
        plain = [(begin + part.start, end + part.start) for part in parts for begin, end in part.tokens.offsets]
        offsets, pieces = np.zeros((len(owners), 2), np.int32), [*whole.tokens]
        inside = np.zeros(len(owners), np.bool_)
        ordinary = np.flatnonzero(np.array(whole.special_tokens_mask) == 0).tolist()
        for at, (begin, end) in zip(ordinary, plain, strict=True):
            if (owner := int(owners[at])) < 0:
                continue
            before = 0 if owner and rule.template is None else begins[owner]
            begin, end = max(0, begin - before), end - before  # a token may have the space before its word too
            offsets[at] = begin, end
            own = texts[owner][begin:end]
            if whole.ids[at] == self._unknown:
                pieces[at] = own
            elif self._marks_inside:
                inside[at] = len(pieces[at]) != len(own)
            else:
                inside[at] = begin > 0 and " " not in texts[owner][begin - 1 : begin + 1]
        return Spelling(owners, Written(texts, offsets, pieces, inside, self._joined))

    def _joined(self, pieces: Sequence[str]) -> str:
        """The text of some words of the vocabulary."""
        decoder = self.tokenizer.decoder
        return str(decoder.decode([*pieces])) if decoder is not None else " ".join(pieces)

    def _looked_up(self, tokens: Tokens, domain: str | None) -> Tokens:
        if self._skipped is not None and (tokens.ids == self._skipped[0]).any():
            tokens = tokens._replace(places=text_positions(tokens.ids, *self._skipped))
        if self._tables is not None:
            self._opened.add(opened := self._tables.opened(domain))
            tokens = tokens._replace(ids=opened.rows(tokens.ids))
        return tokens

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


def _bounded(rule: Preprocessing, query: Query, longest: int) -> Preprocessing:
    """The rule for a query that says itself how long it may be, or which of its texts is cut. Raises
    ``InvalidInput``."""
    if query.max_length is not None:
        if query.max_length < 1:
            raise InvalidInput(f"max_length: expected a number of tokens from 1, found {query.max_length}")
        rule = dataclasses.replace(rule, max_length=min(query.max_length, rule.max_length or longest))
    if query.truncation_strategy is not None:
        rule = dataclasses.replace(rule, truncation_strategy=query.truncation_strategy)
    return rule


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """The id of a word that a vocabulary lacks."""
    if "unk_id" in model:
        return None if model["unk_id"] is None else int(model["unk_id"])
    found: int | None = model["vocab"].get(model.get("unk_token"))
    return found


def _flat_integers(name: str, values: object) -> npt.NDArray[np.integer]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # ragged, or beyond 64 bits
        array = np.empty(0)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise InvalidInput(f"{name} must be a non-empty flat sequence of integers")
    return array


def _owners(whole: Encoding, part: Part, query: Query, rule: Preprocessing) -> npt.NDArray[np.int8]:
    """``Spelling.of_text`` of a query whose first text, as it is tokenised, is ``part``. A token that reaches out of a
    text belongs to none."""
    owners = np.array(whole.special_tokens_mask, np.int8)  # its sequence_ids forget the first text of some pairs
    ordinary = np.flatnonzero(owners == 0)
    owners = -owners
    owners[ordinary[len(part.tokens) :]] = 1
    if rule.template is None and not rule.prefix:
        return owners
    assert query.text is not None
    places = list(places_of(query.text, query.text_pair, rule))
    found = []
    for begin, end in part.tokens.offsets:
        a, b = (at + part.start for at in trimmed(part.text, begin, end))
        found.append(next((number for first, last, number in places if first <= a and b <= last), -1))
    owners[owners == 0] = found
    return owners
