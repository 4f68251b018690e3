"""A process's own folder for temporary files. What a process that was killed left there, the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "jpets-scratch-"
NEW = "jpets-new-"
"""Prefix until a folder is locked: what can be swept is either locked or a dead process's."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder among the system's temporary files, gone at the end. It is locked while its process lives."""
    parent = Path(tempfile.gettempdir())
    sweep_scratch(parent)
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
    with _locked(new):
        folder = new.rename(parent / f"{PREFIX}{new.name.removeprefix(NEW)}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep_scratch(parent: Path) -> int:
    """Removes the folders of this user's dead processes from ``parent``; returns how many."""
    removed = 0
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, another user's, or gone meanwhile
            if path.lstat().st_uid == os.geteuid():
                with _locked(path):
                    shutil.rmtree(path)
                    removed += 1
    return removed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises ``OSError`` where another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
