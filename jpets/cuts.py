"""Places where a text can be cut before it is tokenised, so that its parts' tokens are those of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LOCAL_NORMALIZERS = frozenset(
    {"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled"}
)
"""None of them looks beyond a space, or joins it to what stands before it."""
DIVIDERS = frozenset({"BertPreTokenizer", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit"})
"""Words end before a space."""
SPACE = r"(?<=[\w!-~])(?= )"
BERT_SPACE = r"(?=[ \t\r\n])"
SIGN = r"!-/:-@\[-`{-~"
IDEOGRAPH = "\u3400-\u4dbf\u4e00-\u9fff"
NEAR = 256
"""Characters that are searched first; then sixteen times as many, until there are no more."""


class Cuts:
    """Where texts can be cut for one tokenizer, given by its ``tokenizer.json``; nowhere where that is not certain.

    Between words: before a space, and for BERT's tokenizer also between two signs or ideographs, each of which is a
    word. The tokens of both parts are then, one after the other, those of the whole, whatever stands further away.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        pattern = _pattern(document)
        self._pattern = re.compile(pattern) if pattern else None

    def before(self, text: str, at: int) -> int:
        """The last cut up to ``at``; 0 where there is none."""
        return max(self._near(text, at, -1), default=0)

    def after(self, text: str, at: int) -> int:
        """The first cut from ``at`` on; the end of the text where there is none."""
        return min(self._near(text, at, 1), default=len(text))

    def _near(self, text: str, at: int, side: int) -> list[int]:
        """The cuts in the smallest part of the text on one side of ``at`` that has any."""
        width = NEAR
        while self._pattern is not None and 0 < at < len(text):
            begin, end = (at, at + width) if side > 0 else (at - width, at)
            begin, end = max(1, begin), min(len(text) - 1, end)
            own = text[begin - 1 : end + 1]  # with a character on either side to look at
            found = [begin - 1 + each.start() for each in self._pattern.finditer(own)]
            if found := [place for place in found if begin <= place <= end]:
                return found
            if (begin if side < 0 else len(text) - 1 - end) <= 1:
                break
            width *= 16
        return []


def _pattern(document: Mapping[str, Any]) -> str | None:
    """The pattern that finds cuts. None where a part of the tokenizer may join text across them."""
    normalizers = list(_parts(document.get("normalizer"), "normalizers"))
    dividers = list(_parts(document.get("pre_tokenizer"), "pretokenizers"))
    kinds = [each["type"] for each in dividers]
    added = document.get("added_tokens") or []
    bert = kinds == ["BertPreTokenizer"]
    if (
        not DIVIDERS.intersection(kinds)
        or not all(map(_is_local, normalizers))
        or not all(map(_divides, dividers))
        or (document.get("model") or {}).get("dropout")
        or any(re.search(r"\s", token["content"]) for token in added)
        or any(token["normalized"] and not token["content"].isascii() for token in added)
        or (not bert and any(token["rstrip"] for token in added))  # it takes the space that a word begins with
    ):
        return None
    if not bert:
        return SPACE
    words = SIGN
    if any(each.get("handle_chinese_chars") for each in normalizers):
        words += IDEOGRAPH
    between = f"(?<=[{words}])(?=[{words}])"
    safe = not any(token["single_word"] or re.search(between, token["content"]) for token in added)
    return f"{BERT_SPACE}|{between}" if safe else BERT_SPACE


def _parts(part: Mapping[str, Any] | None, sequence: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[sequence]:
            yield from _parts(each, sequence)
    else:
        yield part


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    kind = normalizer["type"]
    if kind == "Strip":
        return not normalizer["strip_left"]
    if kind == "Replace":
        return bool(normalizer["pattern"] == {"Regex": " {2,}"} and normalizer["content"] in (" ", "\u2581"))
    return kind in LOCAL_NORMALIZERS


def _divides(part: Mapping[str, Any]) -> bool:
    """Whether this part ends words before spaces, or at least looks at nothing beyond them."""
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Metaspace":
        return bool(part.get("split", True))
    return kind in DIVIDERS or kind in ("Punctuation", "Digits")
