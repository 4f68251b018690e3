"""Host memory: how much there is, what the allocator holds on to, and what the garbage collector looks at."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pathlib
import threading

ARENA_MAX, MMAP_MAX, TRIM_THRESHOLD = -8, -4, -1
"""Options of ``mallopt``, as malloc.h numbers them."""
KEEPING = ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, -1))
SELDOM = 100
"""Collections of the middle generation between two of all objects. The usual 10 pass while a queue fills."""
PROGRAMS_SHARE = 1 / 8
LEAST_PROGRAMS_MB, MOST_PROGRAMS_MB = 896, 4096
FREEZING = threading.Lock()
"""Held while the heap is thawed: nobody else must take it for one that was never frozen."""
CGROUP = pathlib.Path("/proc/self/cgroup")
CGROUPS = pathlib.Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of memory that this process may take: the machine's, or what a container leaves it (Linux cgroups, either
    version)."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = os.fsdecode(CGROUP.read_bytes()).splitlines()
    except OSError:
        return found[0]  # not Linux
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers in ("", "memory"):
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            own = pathlib.PurePosixPath(controllers, path.lstrip("/"))
            for folder in (own, *own.parents):  # a limit of any group around counts, and a container sees only its root
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    found.append(int((CGROUPS / folder / name).read_text(encoding="ascii")))
    return min(found)


def usual_programs_mb(devices: int = 1) -> int:
    """MiB of host memory for the compiled programs of each of so many devices."""
    share = int(host_memory() * PROGRAMS_SHARE) >> 20
    return max(LEAST_PROGRAMS_MB, min(MOST_PROGRAMS_MB, share // devices))


def return_free_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    Compiling or loading a program leaves three times as much free memory behind as the program keeps (MiniLM: 50 MB and
    16 MB), scattered so that it is not returned by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keeps what is freed for what is allocated next, where the C library can (glibc). For processes that train.

    An update's intermediate results (0.1 GB for 8 texts of MiniLM) are allocated and freed as a whole. glibc takes such
    a block from the system for each update and gives it back after, and to fill it with fresh pages takes a quarter of
    the update's time on a CPU. Only the first arena holds blocks of that size, so all threads get that one. A server's
    batches need less, which glibc keeps by itself, and its threads do better with arenas of their own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in KEEPING:
            mallopt(option, value)


def freeze_heap() -> None:
    """Keeps the garbage collector from looking again at objects that exist now, and from full collections too often.

    A full collection stops every thread of Python. With an engine's libraries, programs and tasks it takes 100 to 150
    ms, the time of ten small batches, and with a full queue 40 ms, although its 4,096 queries are in no cycles and go
    by themselves. For processes whose engine lives as long as they do.
    """
    with FREEZING:
        gc.collect()
        gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)


def collect_all() -> None:
    """Frees what nothing refers to any more, also of what ``freeze_heap`` froze; the rest stays frozen."""
    with FREEZING:
        frozen = gc.get_freeze_count() > 0
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
