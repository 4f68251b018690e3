"""How often the n-grams of a corpus occur, in bounded memory, and which make up a share of all occurrences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from jpets.errors import Conflict, InvalidInput
from jpets.files import space_errors
from jpets.plot.ngrams import TOKEN_BITS, Window, keys_of

BUFFERED = 1 << 22
"""N-grams that are kept in memory before they are counted and written: 100 MB with what sorting them takes."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio."""
FILES = 64
"""Files that n-grams are spread over by their keys; one at a time is counted whole in memory."""


class NgramCounter:
    """Counts n-grams exactly. ``folder`` holds what does not fit in memory; a counter is of no use after an error.

    Raises ``Conflict`` for a folder that is not empty.
    """

    def __init__(self, folder: Path, window: Window, *, buffered: int = BUFFERED) -> None:
        if any(folder.iterdir()):
            raise Conflict("the folder for counts must be empty: what an earlier run left would be counted again")
        self._folder, self._window, self._most = folder, window, buffered
        self._record = np.dtype([("key", window.key_dtype), ("count", np.int64)])
        self._buffer: list[Shaped[np.ndarray, " t"]] = []
        self._size = 0
        self.total = 0
        """Occurrences of all n-grams."""

    def add(self, grams: Int[np.ndarray, "t n"]) -> None:
        """Counts these n-grams. Raises ``OutOfSpace``."""
        self._buffer.append(keys_of(grams))
        self._size += len(grams)
        self.total += len(grams)
        if self._size >= self._most:
            self._spread()

    def counts(self) -> Iterator[Shaped[np.ndarray, " distinct"]]:
        """Records of ``key`` and ``count``: each n-gram once, in parts that are sorted by key."""
        self._spread()
        for path in sorted(self._folder.iterdir()):
            records = np.fromfile(path, self._record)
            keys, inverse = np.unique(records["key"], return_inverse=True)
            found = np.empty(len(keys), self._record)
            found["key"] = keys
            found["count"] = np.bincount(inverse, records["count"]).astype(np.int64)
            yield found

    def most_frequent(self, share: float) -> Shaped[np.ndarray, " kept"]:
        """The sorted keys of the most frequent n-grams: as few as make up ``share`` of all occurrences (HMI's alpha,
        section 7.7). Of equally frequent ones those with smaller keys come first.

        Raises ``InvalidInput`` for a share outside 0 to 1.
        """
        if not 0 <= share <= 1:
            raise InvalidInput(f"alpha must be a share of 0 to 1, found {share}")
        frequencies, left = self._frequencies(), share * self.total
        least, of_least = max(frequencies, default=0) + 1, 0
        for count in sorted(frequencies, reverse=True):
            if left <= 0:
                break
            least, of_least = count, min(frequencies[count], math.ceil(left / count))
            left -= count * frequencies[count]
        above, equal = [np.zeros(0, self._window.key_dtype)], [np.zeros(0, self._window.key_dtype)]
        for part in self.counts():
            above.append(part["key"][part["count"] > least])
            equal.append(part["key"][part["count"] == least])
        return np.sort(np.concatenate([*above, np.sort(np.concatenate(equal))[:of_least]]))

    def _frequencies(self) -> dict[int, int]:
        """How many n-grams occur so often."""
        found: dict[int, int] = {}
        for part in self.counts():
            for count, number in zip(*np.unique(part["count"], return_counts=True), strict=True):
                found[int(count)] = found.get(int(count), 0) + int(number)
        return found

    def _spread(self) -> None:
        """Writes what is in memory to the files of its keys."""
        if not self._size:
            return
        keys, counts = np.unique(np.concatenate(self._buffer), return_counts=True)
        records = np.empty(len(keys), self._record)
        records["key"], records["count"] = keys, counts
        file = _hashed(keys) % FILES
        order = np.argsort(file, kind="stable")
        ends = np.searchsorted(file[order], np.arange(FILES + 1))
        with space_errors():
            for number in range(FILES):
                own = records[order[ends[number] : ends[number + 1]]]
                if len(own):
                    with (self._folder / f"{number:02}.counts").open("ab") as out:
                        out.write(own.tobytes())
        self._buffer, self._size = [], 0


def _hashed(keys: Shaped[np.ndarray, " k"]) -> Shaped[np.ndarray, " k"]:
    """Numbers that are spread evenly: Fibonacci hashing of the last 64 bits."""
    last = np.ascontiguousarray(keys).view(np.uint64).reshape(len(keys), -1)[:, -1]
    mixed: Shaped[np.ndarray, " k"] = (last ^ last >> np.uint64(TOKEN_BITS)) * GOLDEN >> np.uint64(40)
    return mixed
