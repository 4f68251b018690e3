"""How often the n-grams of a corpus occur, in bounded memory, and which make up a share of all occurrences.

Counts are in files that never change, each of some texts in a row and named by the number of the first one. A file has
``HEAD`` integers, which are the number of the text behind its last one and where each part of its records begins and
ends; then records of a key and a count, by part and key. An n-gram is in the same part of all files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from jpets.errors import InvalidInput
from jpets.files import TEMPORARY, sweep
from jpets.plot.ngrams import TOKEN_BITS, Window, keys_of
from jpets.plot.sealed import read_sealed, write_sealed

log = logging.getLogger(__name__)

BUFFERED = 1 << 22
"""N-grams that are kept in memory before they are counted and written, which takes up to half a gigabyte."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio."""
PARTS = 64
"""Parts that n-grams are spread over by their keys; one at a time is counted whole in memory."""
HEAD = 1 + PARTS + 1
SUFFIX = ".counts"


class NgramCounter:
    """Counts the n-grams of texts exactly. ``folder`` holds what does not fit in memory, and is of this counter alone.

    A counter of the same texts and window goes on in it behind the last text that an earlier one had written. Files
    that are damaged are removed with those behind them.
    """

    def __init__(self, folder: Path, window: Window, *, buffered: int = BUFFERED) -> None:
        self._folder, self._window, self._most = folder, window, buffered
        self._record = np.dtype([("key", window.key_dtype), ("count", np.int64)])
        self._buffer: list[Shaped[np.ndarray, " t"]] = []
        self._size = 0
        self._written = 0
        """Texts that files have."""
        self.texts = 0
        """Texts that were counted."""
        self.total = 0
        """Occurrences of all n-grams."""
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, TEMPORARY, 0)  # which a killed counter left
        for path in self._files():
            if not self._take(path):
                log.warning("%s of counted n-grams is not whole: its texts are counted again", path.name)
                path.unlink()

    def add(self, number: int, grams: Int[np.ndarray, "t n"]) -> None:
        """Counts the n-grams of the text of this ``number``, unless they are counted already; texts come in order.
        Raises ``OutOfSpace``."""
        if number < self.texts:
            return
        assert number == self.texts
        self._buffer.append(keys_of(grams))
        self._size += len(grams)
        self.total += len(grams)
        self.texts += 1
        if self._size >= self._most:
            self._write()

    def counts(self) -> Iterator[Shaped[np.ndarray, " distinct"]]:
        """Records of ``key`` and ``count``: each n-gram once, in parts that are sorted by key."""
        self._write()
        files = self._files()
        places = [np.fromfile(path, np.int64, HEAD)[1:].tolist() for path in files]
        for part in range(PARTS):
            own = [self._read(path, begin[part], begin[part + 1]) for path, begin in zip(files, places, strict=True)]
            records = np.concatenate([np.empty(0, self._record), *own])
            if not len(records):
                continue
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

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{SUFFIX}"))

    @property
    def _next(self) -> Path:
        """The file of the texts that no file has yet."""
        return self._folder / f"{self._written:012}{SUFFIX}"

    def _take(self, path: Path) -> bool:
        """Whether the file is whole and has the texts behind those that were taken."""
        content = read_sealed(path) if path == self._next else None
        if content is None:
            return False
        head = np.frombuffer(content, np.int64, HEAD)
        self.total += int(np.frombuffer(content, self._record, offset=head.nbytes)["count"].sum())
        self.texts = self._written = int(head[0])
        return True

    def _read(self, path: Path, begin: int, end: int) -> Shaped[np.ndarray, " r"]:
        start = HEAD * np.dtype(np.int64).itemsize + begin * self._record.itemsize
        return np.fromfile(path, self._record, end - begin, offset=start)

    def _write(self) -> None:
        """Writes what is in memory to a file of its own."""
        if not self._size:
            return
        keys, counts = np.unique(np.concatenate(self._buffer), return_counts=True)
        part = _hashed(keys) % PARTS
        order = np.argsort(part, kind="stable")
        records = np.empty(len(keys), self._record)
        records["key"], records["count"] = keys[order], counts[order]
        places = np.searchsorted(part[order], np.arange(PARTS + 1))
        write_sealed(self._next, [np.array([self.texts, *places], np.int64), records])
        self._buffer, self._size, self._written = [], 0, self.texts


def _hashed(keys: Shaped[np.ndarray, " k"]) -> Shaped[np.ndarray, " k"]:
    """Numbers that are spread evenly: Fibonacci hashing of the last 64 bits."""
    last = np.ascontiguousarray(keys).view(np.uint64).reshape(len(keys), -1)[:, -1]
    mixed: Shaped[np.ndarray, " k"] = (last ^ last >> np.uint64(TOKEN_BITS)) * GOLDEN >> np.uint64(40)
    return mixed
