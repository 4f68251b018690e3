"""A checkpoint's folder, or a zip archive of one, unpacked where nothing in it can reach anything else."""

from __future__ import annotations

import contextlib
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from jpets.errors import InvalidTask, NotFound

MAX_FILES = 64
LONGEST_NAME = 255
LONGEST_PATH = 1024
MAX_BYTES = 4 << 30
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Ways of packing that zipfile unpacks in small pieces; of others a few bytes may fill the memory at once."""
BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, FileExistsError,
          NotADirectoryError, ValueError)  # fmt: skip
"""What damaged entries, encrypted ones, and names that are another's folder raise."""
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
    try:
        archive = zipfile.ZipFile(source)
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise InvalidTask(f"{source.name!r} is no folder and no zip archive; give a checkpoint's folder") from error
    with archive, tempfile.TemporaryDirectory(prefix="jpets-import-") as folder:
        _unpack(archive, source.stat().st_size, Path(folder))
        yield _only_folder(Path(folder))


def _unpack(archive: zipfile.ZipFile, size: int, folder: Path) -> None:
    files = [info for info in archive.infolist() if not info.is_dir()]
    if len(files) > MAX_FILES:
        raise InvalidTask(f"the archive may hold {MAX_FILES} files, found {len(files)}")
    for info in files:
        path = PurePosixPath(info.filename)
        linked = stat.S_ISLNK(info.external_attr >> 16)
        lengths = [len(part.encode(errors="replace")) for part in path.parts]
        if max(lengths, default=0) > LONGEST_NAME or sum(lengths) > LONGEST_PATH:
            raise InvalidTask(f"the archive's entry {info.filename[:100]!r}... has too long a name; pack it again")
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
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as entry, target.open("xb") as file:
                shutil.copyfileobj(entry, file)
        except BROKEN as error:
            raise InvalidTask(f"the archive's entry {info.filename[:100]!r} cannot be read; pack it again") from error


def _only_folder(folder: Path) -> Path:
    """Inside of folders that hold nothing but one folder, as archives of a folder do."""
    while len(found := list(folder.iterdir())) == 1 and found[0].is_dir():
        folder = found[0]
    return folder
