"""Answers kept for repeated queries (TurboTransformers, section 5: the response cache of figure 2)."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from jpets.engine.batch.rows import Row
from jpets.results import CACHE
from jpets.types import Fills, Result, Timing

ENTRY_BYTES = 1024
"""Bytes of an entry besides its numbers: key, result object, places in the cache's tables (measured, rounded up)."""
NO_IDS, NO_PLACES = np.empty(0, np.int32), np.empty(0, np.intp)
HIT = Timing(queued=0.0, computed=0.0, bucket="", program=CACHE, fallback=False)

ResponseKey = tuple[str, object, int, tuple[int, int, bool] | bytes | None, str | None, bytes]


def response_key(tenant: str, loading: object, row: Row) -> ResponseKey:
    """All that decides an answer: the tenant, the loading of a task (None: the plain backbone), pooling, tokens, and
    the tables that these are looked up in.

    For a question, also where its context stands; for labelled tokens, also which of them belong to the text. The text
    decides only the words of the answer, and these are not kept: another text may have the same tokens.
    """
    tokens = hashlib.blake2b(digest_size=32)
    for _, given in sorted(row.inputs.items()):
        tokens.update(given.tobytes())
    owners = row.spelling.of_text.tobytes() if row.spelling is not None else None
    tables = None if row.tables is None else row.tables.name
    return tenant, loading, row.pooling, row.passage.place if row.passage else owners, tables, tokens.digest()


class ResponseCache:
    """Answers without error in at most ``budget`` bytes; the least recently used one leaves first. Thread-safe.

    It keeps and hands out copies: no two holders share an array. A budget of 0 turns it off.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._kept: MutableMapping[ResponseKey, Result] = _least_recent(budget) if budget else {}

    @property
    def bytes(self) -> int:
        """Host memory of the kept answers, estimated by ``entry_bytes``."""
        return int(getattr(self._kept, "currsize", 0))

    def get(self, key: ResponseKey) -> Result | None:
        """The kept answer, with a timing that says ``cache``; counts a hit or a miss."""
        with self._lock:
            kept = self._kept.get(key)
            self.hits += kept is not None
            self.misses += kept is None
        return None if kept is None else _copied(kept)

    def keep(self, key: ResponseKey, result: Result) -> None:
        """Keeps an answer, unless it has an error or is larger than the budget. Of a ``Fills`` the outputs alone: the
        next query with this key brings its own masks and head."""
        if isinstance(result, Fills):
            masked = dataclasses.replace(result.masked, ids=NO_IDS, places=NO_PLACES)
            result = dataclasses.replace(result, masked=masked, tensors={})
        if result.error is None and entry_bytes(result) <= self.budget:
            copy = _copied(result)
            with self._lock:
                self._kept[key] = copy


def _least_recent(budget: int) -> MutableMapping[ResponseKey, Result]:
    from cachetools import LRUCache  # engines without this cache run in environments that lack it

    return LRUCache(budget, getsizeof=entry_bytes)


def entry_bytes(result: Result) -> int:
    """Estimated host memory of an entry. Names of labels are not counted: they are the task's."""
    return ENTRY_BYTES + sum(array.nbytes for array in _arrays(result).values())


def _copied(result: Result) -> Result:
    own: dict[str, Any] = {name: array.copy() for name, array in _arrays(result).items()}
    return dataclasses.replace(result, timing=HIT, **own)


def _arrays(result: Result) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(result).items() if isinstance(value, np.ndarray)}
