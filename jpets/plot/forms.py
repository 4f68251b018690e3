"""Normal forms of tokens: "The", "THE" and "the" share the rows of one, so a table of as many bytes finds more n-grams
(as Engram and SCONE index theirs).

A map of forms has one entry for each raised id (``jpets.plot.ngrams``): the raised id of its normal form, 0 for 0. It
maps normal forms onto themselves.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from jpets.errors import InvalidTable
from jpets.files import write_atomic

SUFFIX = ".forms"
STORED = np.dtype("<i4")
BYTES = "ByteLevel"
"""Tokenizers that write the bytes of a token's text as letters of their own."""
NO_LETTER = "\ufffd"


def forms_of(tokenizer_json: str, words: int) -> Int[np.ndarray, " w"]:
    """The map of a vocabulary of ``words`` ids: tokens whose texts are alike but for case and compatibility forms
    (NFKC) get that of the least id whose text is the normal one, or else the least id among them. Special tokens, and
    tokens that are a part of a letter, stay."""
    document = json.loads(tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    apart = set(tokenizer.get_added_tokens_decoder())
    ids: dict[str, int] = {}
    alike: dict[str, list[int]] = {}
    for id, text in _texts(tokenizer, words, _has_bytes(document)):
        if id not in apart and NO_LETTER not in text:
            ids.setdefault(text, id)
            alike.setdefault(normal_text(text), []).append(id)
    found = np.arange(words + 1)
    for text, members in alike.items():
        found[np.array(members) + 1] = ids.get(text, members[0]) + 1
    return found


def normal_text(text: str) -> str:
    """A text in lower case and NFKC."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).lower())


def write_forms(folder: Path, forms: Int[np.ndarray, " w"]) -> str:
    """Writes a map into ``folder``, which it makes, under its digest, and returns that. Raises ``OutOfSpace``."""
    folder.mkdir(exist_ok=True)
    content = forms.astype(STORED).tobytes()
    digest = hashlib.sha256(content).hexdigest()
    write_atomic(folder / f"{digest}{SUFFIX}", content)
    return digest


def read_forms(folder: Path, digest: str, words: int) -> Int[np.ndarray, " w"]:
    """What ``write_forms`` wrote. Raises ``InvalidTable`` where it is missing, damaged or of another vocabulary."""
    try:
        content = (folder / f"{digest}{SUFFIX}").read_bytes()
    except OSError as error:
        raise InvalidTable("the normal forms of these tables are missing; make the root again") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise InvalidTable("the normal forms of these tables are damaged; make the root again")
    if len(content) != (words + 1) * STORED.itemsize:
        raise InvalidTable(
            f"expected normal forms of {words:,} tokens, found those of {len(content) // STORED.itemsize - 1:,}; "
            "make the root again"
        )
    return np.frombuffer(content, STORED).astype(np.int64)


def _texts(tokenizer: Tokenizer, words: int, of_bytes: bool) -> Iterator[tuple[int, str]]:
    """(id, text) of each token, in the order of ids; a mark of a word's beginning or inside is part of the text."""
    decoder = ByteLevel()
    for text, id in sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda each: each[1]):
        if id < words:
            yield id, decoder.decode([text]) if of_bytes else text


def _has_bytes(document: dict[str, object]) -> bool:
    def kinds(part: object) -> Iterator[object]:
        if isinstance(part, dict):
            yield part.get("type")
            for own in (*part.get("decoders", ()), *part.get("pretokenizers", ())):
                yield from kinds(own)

    return any(BYTES in kinds(document.get(part)) for part in ("decoder", "pre_tokenizer"))
