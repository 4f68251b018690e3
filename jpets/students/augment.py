"""More texts for students to learn from: copies in which some words are replaced by words of a similar meaning
(TinyBERT, Jiao et al. 2020, section 4.2), which need no labels, as the teacher answers them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jpets.training.data import Example
from jpets.types import LoadedBackbone

NEIGHBOURS = 15
"""Words of similar meaning that one is replaced by, at random."""
SHARE = 0.4
"""Share of the words that are replaced."""
WORD = re.compile(r"[^\W\d_]{3,}")
MARKS = ("\u2581", "\u0120")
"""Beginnings of words in SentencePiece and byte-level vocabularies."""


class Thesaurus:
    """Words of a backbone's vocabulary, each near others by the cosine of their embeddings. Words in several pieces
    have no neighbours and stay."""

    def __init__(self, backbone: LoadedBackbone) -> None:
        vocabulary = json.loads(backbone.tokenizer_json)["model"]["vocab"]
        numbers = (
            vocabulary if isinstance(vocabulary, dict) else {piece: at for at, (piece, _) in enumerate(vocabulary)}
        )
        marked = {piece[1:]: at for piece, at in numbers.items() if piece.startswith(MARKS)}
        words = marked or numbers
        known = [(word, at) for word, at in words.items() if WORD.fullmatch(word)]
        self._words = [word for word, _ in known]
        self._place = {word: at for at, word in enumerate(self._words)}
        table = np.asarray(backbone.params["word"], np.float32)[[at for _, at in known]]
        self._unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        self._near: dict[str, Sequence[str]] = {}

    def near(self, word: str) -> Sequence[str]:
        """The nearest other words; none for an unknown word."""
        if word not in self._near:
            self._near[word] = self._nearest(self._place[word]) if word in self._place else ()
        return self._near[word]

    def _nearest(self, at: int) -> Sequence[str]:
        cosines: npt.NDArray[np.float32] = self._unit @ self._unit[at]
        cosines[at] = -np.inf
        count = min(NEIGHBOURS, len(cosines) - 1)
        return [self._words[each] for each in np.argpartition(-cosines, count)[:count]]

    def varied(self, text: str, rng: np.random.Generator) -> str:
        """The text with a share of its known words replaced."""

        def other(found: re.Match[str]) -> str:
            if rng.random() >= SHARE or not (near := self.near(found[0].lower())):
                return found[0]
            return near[int(rng.integers(len(near)))]

        return WORD.sub(other, text)


def augmented(examples: Sequence[Example], thesaurus: Thesaurus, copies: int, seed: int) -> list[Example]:
    """So many varied copies of each text, without labels; the same for a seed."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            each,
            text=thesaurus.varied(each.plain, rng),
            text_pair=None if each.text_pair is None else thesaurus.varied(each.text_pair, rng),
            label=None,
        )
        for _ in range(copies)
        for each in examples
    ]
