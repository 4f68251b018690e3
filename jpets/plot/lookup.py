"""Rows of a text's n-grams in the tables of its domain (HMI section 5.1, equation 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jpets.errors import InvalidInput, InvalidTable
from jpets.plot.ngrams import Window, keys_of, shortened
from jpets.plot.table import Table

DOMAIN, ROOT = 0, 1
FEW = 512
"""N-grams that are looked up one by one: finding out which are the same takes longer."""


class Found(NamedTuple):
    """Where each token's n-gram is: ``table`` [t], ``DOMAIN`` or ``ROOT``, the ``row`` [t] in it, and the ``level`` [t]
    at which it was found: 0 for the domain's table, 1 for the root's, and one more for each neighbour that was dropped.
    """

    table: Int[np.ndarray, " t"]
    row: Int[np.ndarray, " t"]
    level: Int[np.ndarray, " t"]


class Lookup:
    """The tables of one domain: ``domain``, then ``root``, then ``root`` with fewer neighbours. None: the root alone.

    ``words`` is the size of the vocabulary. Raises ``InvalidTable`` where the root lacks one of its tokens alone: then
    a text could have a token without vectors.
    """

    def __init__(self, root: Table, domain: Table | None, words: int) -> None:
        if domain is not None and (domain.info.window, domain.info.width) != (root.info.window, root.info.width):
            raise InvalidTable("a domain's table must have the window and width of the root's; build it again")
        self.root, self.domain, self._words = root, domain, words
        self._window: Window = root.info.window
        self._spans = [(self._window.before, self._window.after), *self._window.shorter]
        alone = np.zeros((words, self._window.size), np.int64)
        alone[:, self._window.before] = np.arange(words) + 1
        if missing := int((root.find(keys_of(alone)) < 0).sum()):
            raise InvalidTable(
                f"the root table must have each of {words:,} tokens alone, found {missing:,} missing; build it again"
            )

    def find(self, grams: Int[np.ndarray, "t n"]) -> Found:
        """Where the n-grams of tokens are. Each is found at least as its token alone.

        Raises ``InvalidInput`` for tokens that are not in the vocabulary.
        """
        centre = grams[:, self._window.before]
        if ((centre < 1) | (centre > self._words)).any():
            raise InvalidInput(f"token ids must be from 0 to {self._words - 1}")
        if len(grams) <= FEW:
            return self._find(grams, keys_of(grams))
        keys, first, inverse = np.unique(keys_of(grams), return_index=True, return_inverse=True)
        found = self._find(grams[first], keys)
        return Found(found.table[inverse], found.row[inverse], found.level[inverse])

    def _find(self, grams: Int[np.ndarray, "k n"], keys: Shaped[np.ndarray, " k"]) -> Found:
        row = np.full(len(keys), -1) if self.domain is None else self.domain.find(keys)
        table = np.where(row >= 0, np.int8(DOMAIN), np.int8(ROOT))
        level = np.zeros(len(keys), np.int8)
        for depth, span in enumerate(self._spans, 1):
            missing = np.flatnonzero(row < 0)
            if not len(missing):
                break
            level[missing] = depth
            row[missing] = self.root.find(keys_of(shortened(grams[missing], self._window, *span)))
        return Found(table, row, level)
