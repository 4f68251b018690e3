"""Folders for temporary files: what a process that was killed leaves is swept, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jpets.scratch import PREFIX, scratch_folder, sweep_scratch

HOLDS = """
import sys, tempfile
from jpets.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "half an upload").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_folders_of_dead_processes_are_swept(temporary: Path) -> None:
    others = [temporary / name for name in (f"{PREFIX}file", "jpets-other", "unrelated")]
    others[0].write_text("no folder")
    for folder in others[1:]:
        folder.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "unrelated")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        assert folder.parent == temporary and sweep_scratch(temporary) == 0
        other.kill()
        other.wait()
        assert (folder / "half an upload").exists()
    with scratch_folder() as own:
        assert not folder.exists() and own.is_dir()
        assert sweep_scratch(temporary) == 0
    assert not own.exists() and all(path.exists() for path in others)


def test_a_folder_that_is_removed_meanwhile_is_nobodys_error() -> None:
    with scratch_folder() as folder:
        folder.rmdir()


def test_two_folders_of_one_process_are_two() -> None:
    with scratch_folder() as first, scratch_folder() as second:
        assert first != second and first.is_dir() and second.is_dir()
