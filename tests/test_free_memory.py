"""What the garbage collector looks at, and what the allocator holds on to."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref

import pytest

from jpets.free_memory import SELDOM, collect_all, freeze_heap


def test_a_frozen_heap_is_left_out_of_full_collections_which_are_rare() -> None:
    marker, usual = [[number] for number in range(1000)], gc.get_threshold()
    freeze_heap()
    try:
        assert gc.get_threshold() == (*usual[:2], SELDOM) and usual[2] < SELDOM
        assert all(entry is not marker for entry in gc.get_objects(generation=2))
        assert gc.get_freeze_count() >= len(marker)
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


class Cyclic:
    """Refers to itself, as an engine's parts do to each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_frozen_is_freed_once_nothing_refers_to_it(frozen: bool) -> None:
    kept, gone, usual = Cyclic(), Cyclic(), gc.get_threshold()
    if frozen:
        freeze_heap()
    try:
        reference = weakref.ref(gone)
        del gone
        gc.collect()
        assert (reference() is not None) == frozen
        collect_all()
        assert reference() is None and kept.itself is kept
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


FILLED_AGAIN = """
import resource, sys, threading
from jpets.free_memory import keep_freed_memory

def fill():
    bytearray(400 << 20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(3):
    before = faults()
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_what_was_freed_is_not_mapped_again() -> None:
    pages = {how: _faults(how) for how in ("keep", "return")}
    assert pages["return"] > 160 > 10 * pages["keep"]  # 400 Mi / 4 Ki, or / 2 Mi where pages are large


def _faults(how: str) -> int:
    """Page faults of the third time that a thread fills a block."""
    found = subprocess.run([sys.executable, "-c", FILLED_AGAIN, how], capture_output=True, text=True, check=True)
    return int(found.stdout)
