"""One range of addresses in which tables are mapped, so that programs take all of them as one array.

A program is compiled for an array of a fixed shape: a table that comes later is mapped into the range, and no program
changes. Pages of the range without a table hold zeros and take no memory; those of a table are the system's cache of
its file, which processes share.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque

import numpy as np
from jaxtyping import Shaped

from jpets.config import stored_dtype
from jpets.errors import OutOfSpace
from jpets.plot.table import Table, TableInfo

log = logging.getLogger(__name__)

RANGE_BYTES = 1 << 38
"""Addresses of a range: of 128 TiB that a process has."""
MOST_ROWS = (1 << 31) - 1
"""Rows that programs can number."""
SPARE_ROWS = 4096
"""Rows of zeros before all tables, at least: tokens without a row and first runs of programs read there, where no file
is mapped that somebody could have cut off."""
PAGE = mmap.PAGESIZE
FIXED = 0x10
"""``MAP_FIXED``, of Linux and macOS."""
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0x40
"""``MAP_NORESERVE``: no memory is set aside for pages that nobody writes."""
EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
"""Pages of zeros."""
FAILED = ctypes.c_void_p(-1).value


class Arena:
    """``values`` [rows, p, e] hold the vectors of every table that is mapped, all of the shape of ``info``.
    Thread-safe.

    A table is mapped for as long as something refers to it: rows that were looked up in it may be on their way. Then
    its rows are free for other tables, and its file takes no space any more if it was deleted. Raises ``OutOfSpace``
    where the process may not have so many addresses.
    """

    def __init__(self, info: TableInfo, size: int = RANGE_BYTES) -> None:
        """For tables of ``size`` bytes."""
        self._row_bytes = info.row_bytes
        self._step = math.lcm(self._row_bytes, PAGE) // self._row_bytes
        """Tables begin at multiples of so many rows, where pages begin."""
        spare = -(-SPARE_ROWS // self._step) * self._step
        self.rows = min(spare + size // self._row_bytes, MOST_ROWS)
        try:
            space = mmap.mmap(-1, self.rows * self._row_bytes, flags=EMPTY, prot=mmap.PROT_READ)
        except OSError as error:
            raise OutOfSpace(
                f"tables need {size >> 30} GiB of addresses, of which hardly any memory is taken: raise the limit of "
                "virtual memory (ulimit -v unlimited)"
            ) from error
        whole = np.frombuffer(space, stored_dtype(info.kept_as))
        self.values: Shaped[np.ndarray, "r p e"] = whole.reshape(self.rows, *info.row_shape)
        self._room = (self.rows - spare) // self._step * self._step
        """Rows that tables may have."""
        self._free = [(spare, self._room)]
        """The first rows and the sizes of ranges that no table has, in order; neighbours are one."""
        self.moved = 0
        """How often a range was left: its rows may be another table's from then on."""
        self._left: deque[tuple[int, int]] = deque()
        """Ranges whose tables nothing refers to any more."""
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Rows that no table has."""
        return sum(size for _, size in self._free)

    def map(self, table: Table) -> int:
        """The row of the table's first entry, for as long as something refers to the table. Raises ``OutOfSpace`` where
        the range is full."""
        if not table.entries:
            return 0
        rows = -(-table.entries // self._step) * self._step
        pages = -(-table.entries * self._row_bytes // PAGE) * PAGE
        try:
            with self._lock:
                first = self._taken(rows)
                weakref.finalize(table, self._leave, first, rows).atexit = False
                self._map(first, pages, mmap.MAP_SHARED, table.file, table.offset)
        finally:
            self._reclaim()
        return first

    def _taken(self, rows: int) -> int:
        """The first of so many free rows, which are free no more."""
        for at, (first, size) in enumerate(self._free):
            if size >= rows:
                self._free[at : at + 1] = [(first + rows, size - rows)] if size > rows else []
                return first
        raise OutOfSpace(
            f"the tables that are open have {self._room - self.free:,} of {self._room:,} rows, and another one needs "
            f"{rows:,}: remove domains"
        )

    def _leave(self, first: int, rows: int) -> None:
        """In whatever thread lets go of a table, which may be one that holds the lock."""
        self._left.append((first, rows))
        self._reclaim()

    def _reclaim(self) -> None:
        """Frees what tables left, unless somebody holds the lock, who does it then."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    first, rows = self._left[0]
                    self._map(first, rows * self._row_bytes, EMPTY)
                    self._left.popleft()
                    self.moved += 1
                    self._free = _joined([*self._free, (first, rows)])
            except OutOfSpace as full:  # of mappings; the next table that comes or goes tries again
                log.warning("the place of a table stays taken: %s", full.message)
                return
            finally:
                self._lock.release()

    def _map(self, first: int, size: int, flags: int, file: int = -1, offset: int = 0) -> None:
        """Maps a file, or zeros, in place of ``size`` bytes from row ``first`` on. Raises ``OutOfSpace``."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        address = self.values.ctypes.data + first * self._row_bytes
        if libc.mmap(address, size, mmap.PROT_READ, flags | FIXED, file, offset) == FAILED:
            raise OutOfSpace(f"a table could not be mapped: {os.strerror(ctypes.get_errno())}")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, neighbours as one."""
    found: list[tuple[int, int]] = []
    for first, size in sorted(ranges):
        if found and sum(found[-1]) == first:
            before, length = found.pop()
            first, size = before, length + size
        found.append((first, size))
    return found
