"""Rows of a text's n-grams in the tables of its domain (HMI section 5.1, equation 3)."""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jpets.errors import InvalidInput, InvalidTable
from jpets.plot.ngrams import Window, alone, keys_of, shortened
from jpets.plot.table import Table

DOMAIN, ROOT = 0, 1
OWN = -1
"""Level of an n-gram that a domain's own table holds, while layers are trained."""


class Found(NamedTuple):
    """Where each token's n-gram is: ``table`` [t], ``DOMAIN`` or ``ROOT``, the ``row`` [t] in it, and the ``level`` [t]
    at which it was found: 0 for the domain's table, 1 for the root's, and one more for each neighbour that was dropped.
    """

    table: Int[np.ndarray, " t"]
    row: Int[np.ndarray, " t"]
    level: Int[np.ndarray, " t"]


def levels_of(
    grams: Int[np.ndarray, "t n"],
    root: Shaped[np.ndarray, " k"],
    window: Window,
    domain: Shaped[np.ndarray, " d"] | None = None,
) -> Int[np.ndarray, " t"]:
    """How much of each n-gram a table of the sorted keys ``root`` holds: the number of windows of ``Window.shorter``
    that it falls back by, 0 for the whole; ``OWN`` where ``domain`` has it."""
    levels = np.full(len(grams), len(window.shorter), np.int8)
    for level, span in reversed(list(enumerate([(window.before, window.after), *window.shorter]))):
        levels[among(keys_of(shortened(grams, window, *span)), root)] = level
    if domain is not None:
        levels[among(keys_of(grams), domain)] = OWN
    return levels


def among(keys: Shaped[np.ndarray, " t"], known: Shaped[np.ndarray, " k"]) -> Bool[np.ndarray, " t"]:
    """Which keys the sorted ``known`` has."""
    if not len(known):
        return np.zeros(len(keys), np.bool_)
    found: Bool[np.ndarray, " t"] = known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys
    return found


class Lookup:
    """The root's table: an n-gram is looked up whole, then with fewer neighbours; ``of_domain`` looks in a domain's
    table first.

    ``words`` is the size of the vocabulary; with ``forms`` (``jpets.plot.forms``) n-grams are looked up by their normal
    forms. Raises ``InvalidTable`` where the root lacks one of its tokens alone: then a text could have a token without
    vectors.
    """

    def __init__(self, root: Table, words: int, forms: Int[np.ndarray, " w"] | None = None) -> None:
        self.root, self._words, self._forms = root, words, forms
        self.domain: Table | None = None
        self._window: Window = root.info.window
        self._spans = [(self._window.before, self._window.after), *self._window.shorter]
        keys = keys_of(alone(words, self._window, forms))
        if missing := int((root.find(keys) < 0).sum()):
            raise InvalidTable(
                f"the root table must have each of {len(keys):,} tokens alone, found {missing:,} missing; build it "
                "again"
            )

    def of_domain(self, domain: Table) -> Self:
        """Raises ``InvalidTable`` for a table of another kind than the root's."""
        if dataclasses.replace(domain.info, layers=self.root.info.layers) != self.root.info:
            raise InvalidTable(
                "a domain's table must have the window, the width and the format of the root's; build it again"
            )
        own = copy.copy(self)
        own.domain = domain
        return own

    @property
    def is_overwritten(self) -> bool:
        """Whether one of its files was written to since it was opened."""
        return self.root.is_overwritten or (self.domain is not None and self.domain.is_overwritten)

    def find(self, grams: Int[np.ndarray, "t n"]) -> Found:
        """Where the n-grams of tokens are. Each is found at least as its token alone.

        Raises ``InvalidInput`` for tokens that are not in the vocabulary.
        """
        if (grams[:, self._window.before] < 1).any() or (grams < 0).any() or (grams > self._words).any():
            raise InvalidInput(f"token ids must be from 0 to {self._words - 1}")
        if self._forms is not None:
            grams = self._forms[grams]
        keys = keys_of(grams)
        order = keys.argsort()  # neighbours in the order of keys are neighbours in the table
        found = self.domain.find(keys[order]) if self.domain is not None else np.full(len(keys), -1)
        row, level = np.empty_like(found), np.zeros(len(keys), np.int8)
        row[order] = found
        missing = order[found < 0]
        table = np.full(len(keys), DOMAIN, np.int8)
        table[missing] = ROOT
        for depth, span in enumerate(self._spans, 1):
            if not len(missing):
                break
            found = self.root.find(keys_of(shortened(grams[missing], self._window, *span)))
            row[missing], level[missing] = found, depth
            missing = missing[found < 0]
        return Found(table, row, level)
