"""What the garbage collector looks at, and what the allocator holds on to."""

from __future__ import annotations

import gc
import os
import pathlib
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from jpets import free_memory
from jpets.free_memory import SELDOM, collect_all, freeze_heap, host_memory, usual_programs_mb


@pytest.fixture
def usual() -> Iterator[tuple[int, int, int]]:
    """The collector's thresholds, where nothing is frozen. What a test changes is taken back."""
    frozen, usual = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.unfreeze()
    yield usual
    gc.unfreeze()
    gc.set_threshold(*usual)
    if frozen:
        gc.freeze()


def test_a_frozen_heap_is_left_out_of_full_collections_which_are_rare(usual: tuple[int, int, int]) -> None:
    marker = [[number] for number in range(1000)]
    freeze_heap()
    assert gc.get_threshold() == (*usual[:2], SELDOM) and usual[2] < SELDOM
    assert all(entry is not marker for entry in gc.get_objects(generation=2))
    assert gc.get_freeze_count() >= len(marker)


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        ("", {}, None),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": "1000"}, 1000),
        ("0::/", {"memory.max": str(1 << 60)}, None),
        ("0::/pods/one", {"pods/one/memory.max": "max", "pods/memory.max": "3000"}, 3000),
        ("0::/outside/the/container", {"memory.max": "4000"}, 4000),
        ("3:cpu:/x\n2:memory:/box", {"memory/box/memory.limit_in_bytes": "5000", "x/memory.max": "1"}, 5000),
    ],
)
def test_memory_is_what_the_groups_around_leave(
    lines: str, limits: dict[str, str], expected: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n")
    own = tmp_path / "cgroup"
    own.write_text(lines)
    monkeypatch.setattr(free_memory, "CGROUP", own)
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory() == (expected or machine)
    own.unlink()
    assert host_memory() == machine


@pytest.mark.parametrize(
    ("gigabytes", "devices", "expected"), [(4, 1, 896), (16, 1, 2048), (16, 2, 1024), (16, 8, 896), (512, 4, 4096)]
)
def test_programs_take_a_share_of_the_host(
    gigabytes: int, devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "host_memory", lambda: gigabytes << 30)
    assert usual_programs_mb(devices) == expected


class Cyclic:
    """Refers to itself, as an engine's parts do to each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_frozen_is_freed_once_nothing_refers_to_it(frozen: bool) -> None:
    kept, gone = Cyclic(), Cyclic()
    if frozen:
        freeze_heap()
    reference = weakref.ref(gone)
    del gone
    gc.collect()
    assert (reference() is not None) == frozen
    collect_all()
    assert reference() is None and kept.itself is kept
    assert (gc.get_freeze_count() > 0) == frozen


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
