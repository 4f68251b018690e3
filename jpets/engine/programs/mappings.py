"""Memory mappings: Linux lets a process have 65,530, and a CPU's program takes three for each of its kernels."""

from __future__ import annotations

import pathlib
import sys

from jpets.errors import OutOfSpace

MAPPINGS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = pathlib.Path("/proc/sys/vm/max_map_count")
SPARE_MAPPINGS = 8192
"""Reserve for two programs that are loaded at a time (a heavy one of MiniLM takes 840, of BERT-base 1,520, of
BERT-large twice as many), and for arrays and threads."""


def mappings_left() -> int:
    """How many more memory mappings the system grants this process; ``sys.maxsize`` if it does not count them."""
    try:
        return int(MOST_MAPPINGS.read_text()) - MAPPINGS.read_bytes().count(b"\n")
    except OSError:
        return sys.maxsize


def spare_mappings() -> int:
    """``mappings_left``, if they are enough to load a program.

    Raises ``OutOfSpace`` if they are not: XLA would end the process.
    """
    left = mappings_left()
    if left < SPARE_MAPPINGS:
        raise OutOfSpace(
            f"the process may make {left:,} more memory mappings, and {SPARE_MAPPINGS:,} must be free before another "
            "program is loaded: raise the system's limit (sysctl -w vm.max_map_count=262144), or run fewer backbones, "
            "fewer devices or less --program-memory-mb in one process"
        )
    return left
