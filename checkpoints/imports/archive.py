"""A checkpoint's folder, or a zip archive of one, unpacked where nothing in it can reach anything else."""

from __future__ import annotations

import contextlib
import errno
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from checkpoints.zip_directory import open_archive
from jpets.errors import InvalidTask, NotFound

MAX_FILES = 64
MOST_DIRECTORY = 1 << 20
"""Bytes of the list of an archive's files and folders."""
LONGEST_NAME = 255
LONGEST_PATH = 1024
MAX_BYTES = 4 << 30
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Ways of packing that zipfile unpacks in small pieces; of others a few bytes may fill the memory at once."""
BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError,
          OverflowError)  # fmt: skip
"""What damaged or encrypted entries, places outside the file, and names that are another entry's folder raise."""
OF_THE_ARCHIVE = (errno.EINVAL, errno.EEXIST, errno.ENOTDIR)
"""Numbers of the ``OSError`` among these; others are the disk's own."""
MAX_RATIO = 200
"""Times its own size that an archive may unpack to: tensors hardly shrink, but those full of zeros do."""


@contextlib.contextmanager
def open_folder(source: Path) -> Iterator[Path]:
    """``source`` itself where it is a folder; an archive's contents as long as the context lasts.

    Raises ``InvalidTask`` for an archive whose names leave its folder or that unpacks to too much; ``NotFound``.
    """
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise NotFound(f"{source.name!r} is no folder and no file; give a checkpoint's folder or a zip archive of it")
    with _refusing(f"{source.name!r} is no folder and no zip archive that can be read; give a checkpoint's folder"):
        archive = open_archive(source, MOST_DIRECTORY)
    with archive, tempfile.TemporaryDirectory(prefix="jpets-import-") as folder:
        _unpack(archive, source.stat().st_size, Path(folder))
        yield _only_folder(Path(folder))


@contextlib.contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Turns what a broken archive raises into ``InvalidTask`` with ``message``."""
    try:
        yield
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno not in OF_THE_ARCHIVE:
            raise
        raise InvalidTask(message) from error


def _unpack(archive: zipfile.ZipFile, size: int, folder: Path) -> None:
    files = [info for info in archive.infolist() if not info.filename.endswith("/")]
    if len(files) > MAX_FILES:
        raise InvalidTask(f"the archive may hold {MAX_FILES} files, found {len(files)}")
    for info in files:
        path = PurePosixPath(info.filename)
        linked = stat.S_ISLNK(info.external_attr >> 16)
        lengths = [len(part.encode(errors="replace")) for part in path.parts]
        if max(lengths, default=0) > LONGEST_NAME or sum(lengths) > LONGEST_PATH:
            raise InvalidTask(f"the archive's entry {info.filename[:100]!r}... has too long a name; pack it again")
        if not path.parts:
            raise InvalidTask(f"{Path(archive.filename or '').name!r} has an entry without a name; pack it again")
        if info.compress_type not in BOUNDED:
            raise InvalidTask(f"the archive's entry {info.filename[:100]!r} is not stored or deflated; pack it again")
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename or ":" in info.filename or linked:
            raise InvalidTask(
                f"the archive's entry {info.filename[:100]!r} would leave its folder; do not trust this file"
            )
    total = sum(info.file_size for info in files)
    most = min(MAX_BYTES, MAX_RATIO * size)
    if total > most:
        raise InvalidTask(
            f"the archive of {size} bytes would unpack to {total}, expected at most {most}; unpack it yourself if you "
            "trust it"
        )
    for info in files:
        target = folder / info.filename
        with _refusing(f"the archive's entry {info.filename[:100]!r} cannot be read; pack it again"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as entry, target.open("xb") as file:
                shutil.copyfileobj(entry, file)


def _only_folder(folder: Path) -> Path:
    """Inside of folders that hold nothing but one folder, as archives of a folder do."""
    while len(found := list(folder.iterdir())) == 1 and found[0].is_dir():
        folder = found[0]
    return folder
