"""Writing files so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from jpets.errors import InvalidInput, OutOfSpace

TEMPORARY = ".tmp-"
"""Prefix of files and folders that are being written; what a killed process left behind can be told by it."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links, as mounts of object stores are."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a process that lacks something for a while: they say nothing of the file."""
DISK_FULL = "the disk is full; free space or remove tasks, then try again"
STALE_SECONDS = 24 * 3600.0
"""Age at which a folder that is being written can only be a dead process's."""
WEEK_SECONDS = 7 * STALE_SECONDS
"""Age at which nobody will go on with what a killed process left."""


def user_path(path: str | Path) -> Path:
    """A path as a user wrote it: ``~`` is a home folder, and the text is UTF-8 whatever the locale.

    A shell leaves ``~`` alone in ``--output=~/tasks``, in variables and in files. Raises ``InvalidInput`` where there
    is no such home folder.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise InvalidInput(
            f"{str(path)!r} begins with a home folder that is not there; give a path without ~"
        ) from None
    try:
        os.fsencode(found)
    except UnicodeEncodeError:  # a locale that has no such letters
        return Path(os.fsdecode(str(found).encode("utf-8", "surrogateescape")))
    return found


def temporary_sibling(path: Path) -> Path:
    """An unused name next to ``path``."""
    return path.parent / f"{written_by(os.getpid())}{uuid.uuid4().hex}"


def sweep_siblings(folder: Path) -> None:
    """Removes what killed processes left by ``temporary_sibling`` in a user's ``folder``; other programs' files stay,
    whose names may begin alike."""
    sweep(folder, f"{TEMPORARY}[0-9]*-{'[0-9a-f]' * 32}", STALE_SECONDS)


def written_by(process: int) -> str:
    """Prefix of files that the process of this number is writing."""
    return f"{TEMPORARY}{process}-"


def sweep(folder: Path, prefix: str, age: float) -> int:
    """Removes files and folders with this prefix that are older than ``age`` seconds: a killed process left them.
    Returns how many."""
    limit, removed = time.time() - age, 0
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # its writer has just finished, or it is another user's
            if path.stat().st_mtime < limit:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed += 1
    return removed


@contextlib.contextmanager
def space_errors() -> Iterator[None]:
    """Turns a full disk or quota into ``OutOfSpace``; orbax tells of it in words only."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in NO_SPACE or any(os.strerror(code) in str(error) for code in NO_SPACE):
            raise OutOfSpace(DISK_FULL) from error
        raise


def read_bounded(path: Path, most: int) -> bytes:
    """A file's bytes. Raises ``ValueError`` for more than ``most`` of them, whatever the file says of its size."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    return content


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` survive a power cut."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Makes all files below ``folder`` survive a power cut."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def write_atomic(path: Path, data: bytes | memoryview, *, sync: bool = True) -> None:
    """Temp file, fsync, rename, fsync of the folder. Raises ``OutOfSpace``; then ``path`` is as it was. Without
    ``sync`` the last step is the caller's (``sync_folder``), once for many files."""
    _write(path, data, os.replace, sync=sync)


def write_first(path: Path, data: bytes | memoryview) -> None:
    """``write_atomic`` where there is no such file. Raises ``FileExistsError``, also if two come at once."""
    _write(path, data, lambda temporary, path: _link(temporary, path, data))


def _link(temporary: Path, path: Path, data: bytes | memoryview) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _write_synced(path, data)


def _write(path: Path, data: bytes | memoryview, name: Callable[[Path, Path], None], *, sync: bool = True) -> None:
    temporary = temporary_sibling(path)
    try:
        with space_errors():
            _write_synced(temporary, data)
            name(temporary, path)
            if sync:
                sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes | memoryview) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
