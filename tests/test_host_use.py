"""What a server says of its host memory."""

from __future__ import annotations

import mmap
from pathlib import Path

from jpets.app.host_use import OWN, HostUse, in_memory, process_bytes

SIZE = 1 << 24


def test_pages_of_files_count_once_and_when_they_are_read(tmp_path: Path) -> None:
    """However often they are mapped."""
    path = tmp_path / "own.plot"
    path.write_bytes(b"x" * SIZE)
    others = in_memory(OWN, ".plot")  # tables of tests before this one
    with path.open("rb") as file:
        maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for _ in range(2)]
    assert in_memory(OWN, ".plot") - others < SIZE / 2
    before = process_bytes(OWN)
    for each in maps:
        assert each[::4096].count(b"x") == SIZE // 4096
    after = process_bytes(OWN)
    assert abs(in_memory(OWN, ".plot") - others - SIZE) < SIZE / 8
    assert before is not None and after is not None and SIZE / 2 < after - before < 2 * SIZE
    for each in maps:
        each.close()


def test_what_is_still_to_come_is_named() -> None:
    assert str(HostUse(10**9, 0, 0, 0)) == "1.0 GB now"
    use = HostUse(10**9, 2 * 10**9, 10**8, 3 * 10**9)
    assert use.total == 31 * 10**8
    assert str(use) == (
        "1.0 GB now, 3.1 GB when all is in use (tables 2.0 GB, tasks 100.0 MB); further programs may take 3.0 GB"
    )


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path: Path) -> None:
    assert process_bytes(tmp_path) is None and in_memory(tmp_path, ".plot") == 0
