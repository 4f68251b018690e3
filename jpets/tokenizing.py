"""Texts to token ids, by the backbone's own tokenizer and the task's preprocessing."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from jpets.errors import InputTooLong, InvalidInput
from jpets.types import Preprocessing, Query

Ints = npt.NDArray[np.int32]


class Tokens(NamedTuple):
    ids: Ints
    types: Ints


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
        self.pad_id: int = next((id for id in found if id is not None), 0)

    def encode(self, query: Query, rule: Preprocessing, longest: int | None = None) -> Tokens:
        """Token and type ids of a query, special tokens included, at most ``longest`` (the model's limit) of them.

        Raises ``InputTooLong`` where truncation was not asked for, ``InvalidInput`` for an empty or malformed query.
        """
        longest = longest or self.longest
        if (query.text is None) == (query.input_ids is None):
            raise InvalidInput("a query needs either text or input_ids, and not both")
        if query.input_ids is not None:
            return self._check_ids(query, min(longest, rule.max_length or longest))
        assert query.text is not None
        text, pair = self._prepare(query.text, query.text_pair, rule)
        try:
            first = self._tokenizer.encode(text, add_special_tokens=False)
            second = self._tokenizer.encode(pair, add_special_tokens=False) if pair is not None else None
        except (TypeError, UnicodeError) as error:  # a lone surrogate, or no string at all
            raise InvalidInput("the text is not valid Unicode") from error
        limit = min(longest, rule.max_length or longest)
        extra = self._tokenizer.num_special_tokens_to_add(second is not None)
        found = len(first) + (len(second) if second else 0) + extra
        if found > limit:
            if extra >= limit:
                raise InputTooLong(f"the limit of {limit} tokens leaves no room beside {extra} special tokens")
            if not (rule.truncation if query.truncate is None else query.truncate):
                raise InputTooLong(
                    f"the text has {found} tokens, the limit is {limit}; shorten it or ask for truncation"
                )
            first, second = _truncate(first, second, limit - extra)
        whole: Encoding = self._tokenizer.post_process(first, second, True)
        types = np.array(whole.type_ids, np.int32) % self._type_limit
        return Tokens(np.array(whole.ids, np.int32), types)

    def _prepare(self, text: str, pair: str | None, rule: Preprocessing) -> tuple[str, str | None]:
        if not text.strip():
            raise InvalidInput("the text is empty; send at least one character that is not white space")
        if rule.template is not None:
            parts = {"{text}": text, "{text_pair}": pair or ""}
            return re.sub(r"\{text(?:_pair)?\}", lambda found: parts[found[0]], rule.template), None
        return (rule.prefix or "") + text, pair

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
