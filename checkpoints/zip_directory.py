"""How much a zip archive's directory holds, before a list of its entries is made."""

from __future__ import annotations

import zipfile
from pathlib import Path

SIZE = 5
"""The place of the directory's bytes in what zipfile finds at an archive's end."""


def open_archive(path: Path, most: int) -> zipfile.ZipFile:
    """An archive with a directory of at most ``most`` bytes: zipfile makes an object for each of its entries, and a few
    megabytes may pack millions. Raises ``zipfile.BadZipFile``, also for a larger one."""
    with path.open("rb") as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # as it is read when the archive is opened
    if end is not None and end[SIZE] > most:
        raise zipfile.BadZipFile(f"the directory has {end[SIZE]} bytes, expected at most {most}")
    return zipfile.ZipFile(path)
