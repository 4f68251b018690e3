"""Host memory that the allocator holds on to."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    Compiling or loading a program leaves three times as much free memory behind as the program keeps (MiniLM: 50 MB and
    16 MB), scattered so that it is not returned by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
