"""The tables of a domain as they are at a moment, and the rows of tokens in them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from jpets.errors import EngineFailure, InvalidTable
from jpets.plot.lookup import DOMAIN, ROOT, Lookup
from jpets.plot.ngrams import ngrams
from jpets.plot.table import Table


@dataclasses.dataclass(frozen=True)
class Placed:
    """A table, and its first row in the arena."""

    table: Table
    first: int


class LevelCounts:
    """Tokens that were looked up, by domain and by the level at which they were found. Thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._counts: dict[str, Int[np.ndarray, " levels"]] = {}
        self._lock = threading.Lock()

    def add(self, domain: str, level: Int[np.ndarray, " t"]) -> None:
        found = np.bincount(level, minlength=len(self._names))
        with self._lock:
            self._counts[domain] = self._counts.get(domain, 0) + found

    def of(self, domain: str) -> Mapping[str, int]:
        """By the names of levels."""
        with self._lock:
            counts = self._counts.get(domain, np.zeros(len(self._names), np.int64)).tolist()
        return dict(zip(self._names, counts, strict=True))


class OpenDomain:
    """As ``jpets.types.OpenTables`` has it. ``lookup`` finds in the tables of ``root`` and ``domain``; tokens are
    counted as those of the domain ``counted_as``."""

    def __init__(
        self, lookup: Lookup, root: Placed, domain: Placed | None, counts: LevelCounts, counted_as: str
    ) -> None:
        self.lookup, self.root, self.domain = lookup, root, domain
        self._counts, self._counted_as = counts, counted_as

    @property
    def placed(self) -> Sequence[Placed]:
        return [self.root] if self.domain is None else [self.domain, self.root]

    @property
    def name(self) -> str:
        """As ``jpets.types.OpenTables`` has it: the tables' names, which are digests of what they hold."""
        return " ".join(placed.table.name for placed in self.placed)

    def rows(
        self, ids: Int[np.ndarray, " t"], text_of_token: Int[np.ndarray, " t"] | None = None
    ) -> Int[np.ndarray, " t"]:
        """As ``jpets.types.OpenTables`` has it."""
        rows, count = self.found(ids, text_of_token)
        count()
        return rows

    def found(
        self, ids: Int[np.ndarray, " t"], text_of_token: Int[np.ndarray, " t"] | None = None
    ) -> tuple[Int[np.ndarray, " t"], Callable[[], None]]:
        """As ``jpets.types.OpenTables`` has it."""
        if self.lookup.is_overwritten:  # before anything is read there: what was cut off kills the process
            raise EngineFailure("a table was written to while it was open; ask again, or build it anew")
        found = self.lookup.find(ngrams(ids, text_of_token, self.root.table.info.window))
        rows = np.empty(len(ids), np.int32)
        try:
            for placed, own in ((self.domain, found.table == DOMAIN), (self.root, found.table == ROOT)):
                if placed is not None and own.any():
                    placed.table.check(found.row[own])
                    rows[own] = found.row[own] + placed.first
        except InvalidTable as error:
            raise EngineFailure(error.message) from error
        return rows, functools.partial(self._counts.add, self._counted_as, found.level)
