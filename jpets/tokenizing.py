"""Texts to token ids, by the backbone's own tokenizer and the task's preprocessing."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from jpets.errors import InputTooLong, InvalidInput
from jpets.passage import Context, Passage, passage_of_ids, passage_of_text
from jpets.types import LoadedBackbone, Preprocessing, Query

Ints = npt.NDArray[np.int32]


class Tokens(NamedTuple):
    ids: Ints
    types: Ints
    passage: Passage | None = None


class TextEncoder:
    """Thread-safe: the tokenizer is only read. ``longest`` is the most tokens the model takes."""

    def __init__(self, tokenizer_json: str, vocab_size: int, type_vocab_size: int, longest: int) -> None:
        document = json.loads(tokenizer_json)
        document["truncation"] = document["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self._vocab_size = vocab_size
        self._type_limit = max(1, type_vocab_size)
        self.longest = longest
        found = [self._tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>")]
        pads = [id for id in found if id is not None]
        self.pad_id: int = next(iter(pads), 0)
        nothing = self._tokenizer.encode("", add_special_tokens=False)
        self._special = np.array([*self._tokenizer.post_process(nothing, nothing, True).ids, *pads], np.int32)
        """What stands around texts."""

    @classmethod
    def of(cls, backbone: LoadedBackbone) -> Self:
        """For texts as long as the backbone takes."""
        config = backbone.config
        return cls(backbone.tokenizer_json, config.vocab_size, config.type_vocab_size, config.max_positions)

    def encode(self, query: Query, rule: Preprocessing, longest: int | None = None, *, passage: bool = False) -> Tokens:
        """Token and type ids of a query, special tokens included, at most ``longest`` (the model's limit) of them.

        With ``passage`` also where an answer to its question may stand: in the second text of a pair (of a template
        where ``{text_pair}`` stands first), in all of a single text but the task's prefix or what its template sets
        around it. Token ids are a pair where special tokens divide them (``passage_of_ids``).

        Raises ``InputTooLong`` where truncation was not asked for, ``InvalidInput`` for an empty or malformed query,
        and where a question's context has no tokens.
        """
        longest = longest or self.longest
        if (query.text is None) == (query.input_ids is None):
            raise InvalidInput("a query needs either text or input_ids, and not both")
        if query.input_ids is not None:
            tokens = self._check_ids(query, min(longest, rule.max_length or longest))
            return tokens._replace(passage=passage_of_ids(tokens.ids, self._special)) if passage else tokens
        assert query.text is not None
        texts = self._prepare(query.text, query.text_pair, rule)
        truncate = rule.truncation if query.truncate is None else query.truncate
        first, second = self._cut(*texts, min(longest, rule.max_length or longest), truncate=truncate)
        whole: Encoding = self._tokenizer.post_process(first, second, True)
        types = np.array(whole.type_ids, np.int32) % self._type_limit
        tokens = Tokens(np.array(whole.ids, np.int32), types)
        if not passage:
            return tokens
        context = _context(query.text, query.text_pair, rule)
        held = (context.text, second) if second is not None and context.sequence else (texts[0], first)
        return tokens._replace(passage=passage_of_text(context, *held, whole))

    def _prepare(self, text: str, pair: str | None, rule: Preprocessing) -> tuple[str, str | None]:
        if not text.strip():
            raise InvalidInput("the text is empty; send at least one character that is not white space")
        if rule.template is not None:
            return _filled(rule.template, text, pair), None
        return (rule.prefix or "") + text, pair

    def _cut(self, text: str, pair: str | None, limit: int, *, truncate: bool) -> tuple[Encoding, Encoding | None]:
        """Both texts without special tokens, with which they have at most ``limit``."""
        try:
            first = self._tokenizer.encode(text, add_special_tokens=False)
            second = self._tokenizer.encode(pair, add_special_tokens=False) if pair is not None else None
        except (TypeError, UnicodeError) as error:  # a lone surrogate, or no string at all
            raise InvalidInput("the text is not valid Unicode") from error
        extra = self._tokenizer.num_special_tokens_to_add(second is not None)
        found = len(first) + (len(second) if second else 0) + extra
        if found <= limit:
            return first, second
        if extra >= limit:
            raise InputTooLong(f"the limit of {limit} tokens leaves no room beside {extra} special tokens")
        if not truncate:
            raise InputTooLong(f"the text has {found} tokens, the limit is {limit}; shorten it or ask for truncation")
        return _truncate(first, second, limit - extra)

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
    return re.sub(r"\{text(?:_pair)?\}", lambda found: parts[found[0]], template)


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


def _truncate(first: Encoding, second: Encoding | None, room: int) -> tuple[Encoding, Encoding | None]:
    """Longest first, as Hugging Face tokenizers do."""
    a, b = len(first), len(second) if second else 0
    while a + b > room:
        if a >= b:
            a -= 1
        else:
            b -= 1
    first.truncate(a)
    if second:
        second.truncate(b)
    return first, second
