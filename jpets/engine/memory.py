"""Host memory: what the allocator holds on to, and what the garbage collector looks at."""

from __future__ import annotations

import ctypes
import gc


def return_free_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    Compiling or loading a program leaves three times as much free memory behind as the program keeps (MiniLM: 50 MB and
    16 MB), scattered so that it is not returned by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def freeze_heap() -> None:
    """Keeps the garbage collector from looking again at what there is now.

    A full collection stops every thread of Python. With an engine's libraries, programs and tasks it takes 100 to
    150 ms, the time of ten small batches. For processes whose engine lives as long as they do.
    """
    gc.collect()
    gc.freeze()
