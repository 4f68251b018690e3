"""One range of addresses in which tables are mapped, so that programs take all of them as one array.

A program is compiled for an array of a fixed shape: a table that comes later is mapped into the range, and no program
changes. Pages of the range without a table hold zeros and take no memory; those of a table are the system's cache of
its file, which processes share.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading

import numpy as np
from jaxtyping import Shaped

from jpets.config import stored_dtype
from jpets.errors import OutOfSpace
from jpets.plot.table import Table, TableInfo

RANGE_BYTES = 1 << 38
"""Addresses of a range: of 128 TiB that a process has."""
MOST_ROWS = (1 << 31) - 1
"""Rows that programs can number."""
PAGE = mmap.PAGESIZE
FIXED = 0x10
"""``MAP_FIXED``, of Linux and macOS."""
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0x40
"""``MAP_NORESERVE``: no memory is set aside for pages that nobody writes."""
FAILED = ctypes.c_void_p(-1).value


class Arena:
    """``values`` [rows, p, e] hold the vectors of every table that was mapped, all of the shape of ``info``.
    Thread-safe.

    A table stays mapped until nothing refers to ``values``: rows that were looked up in it may still be on their way,
    and pages that nobody reads cost nothing. Raises ``OutOfSpace`` where the process may not have so many addresses.
    """

    def __init__(self, info: TableInfo, size: int = RANGE_BYTES) -> None:
        self._row_bytes = info.row_bytes
        self.rows = min(size // self._row_bytes, MOST_ROWS)
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            space = mmap.mmap(-1, self.rows * self._row_bytes, flags=flags, prot=mmap.PROT_READ)
        except OSError as error:
            raise OutOfSpace(
                f"tables need {size >> 30} GiB of addresses, of which hardly any memory is taken: raise the limit of "
                "virtual memory (ulimit -v unlimited)"
            ) from error
        whole = np.frombuffer(space, stored_dtype(info.kept_as))
        self.values: Shaped[np.ndarray, "r p e"] = whole.reshape(self.rows, *info.row_shape)
        self._step = math.lcm(self._row_bytes, PAGE) // self._row_bytes
        """Tables begin at multiples of so many rows, where pages begin."""
        self._used = 0
        self._lock = threading.Lock()

    def map(self, table: Table) -> int:
        """The row of the table's first entry from now on. Raises ``OutOfSpace`` where the range is full."""
        size = table.entries * self._row_bytes
        pages = -(-size // PAGE) * PAGE
        with self._lock:
            first = self._used
            rows = -(-table.entries // self._step) * self._step
            if first + rows > self.rows:
                raise OutOfSpace(
                    f"the tables that were mapped since the start have {first:,} entries, and there is room for "
                    f"{self.rows:,}: start the server again"
                )
            if pages:
                _map_fixed(self.values.ctypes.data + first * self._row_bytes, pages, table.file, table.offset)
            self._used += rows
        return first


def _map_fixed(address: int, size: int, file: int, offset: int) -> None:
    """Maps a file in place of the pages at ``address``, which are the caller's. Raises ``OutOfSpace``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    found = libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | FIXED, file, offset)
    if found == FAILED:
        raise OutOfSpace(f"a table could not be mapped: {os.strerror(ctypes.get_errno())}")
