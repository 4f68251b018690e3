"""The folder of compiled programs and costs, and its replacement if it cannot be written."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import tempfile
from pathlib import Path

from jpets.errors import InvalidInput, OutOfSpace
from jpets.files import user_path
from jpets.scratch import scratch_folder

log = logging.getLogger(__name__)

PARTS = ("programs", "costs")
VARIABLE = "JPETS_CACHE_DIR"


def default_cache_dir() -> Path:
    """``JPETS_CACHE_DIR``, else ``jpets`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Raises ``InvalidInput`` where there is
    no home folder."""
    if given := os.environ.get(VARIABLE):
        return user_path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (user_path(base) if os.path.isabs(base) else user_path("~/.cache")) / "jpets"


def open_cache(given: Path | None = None) -> Path:
    """The folder, which is made if it does not exist; the default one for None.

    A folder that cannot be written, as in a read-only image, is read; new files are kept in a temporary folder until
    the process ends. So are all files if the default folder cannot be made. Raises ``InvalidInput`` if the given folder
    cannot be one.
    """
    try:
        folder = user_path(given) if given is not None else default_cache_dir()
    except InvalidInput as error:
        if given is not None or os.environ.get(VARIABLE):
            raise InvalidInput(f"--cache-dir: {error.message}") from error
        log.warning("there is no home folder to keep compiled programs in until the next start: give --cache-dir")
        return _temporary(None)
    problem = why_not(folder)
    if problem is None:
        return folder
    if not folder.is_dir() and (given is not None or os.environ.get(VARIABLE)):
        raise InvalidInput(
            f"--cache-dir: {str(folder)!r} cannot be the folder of compiled programs ({problem}); give "
            "--cache-dir a folder that can be written"
        )
    log.warning(
        "the folder of compiled programs cannot be written (%s): what is compiled is kept only until this process "
        "ends; give a folder that can be written by --cache-dir or %s",
        problem,
        VARIABLE,
    )
    return _temporary(folder)


def why_not(folder: Path) -> str | None:
    """The reason why the folder's parts cannot be made and written; None if there is none."""
    try:
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder / part):
                pass
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


@functools.cache
def _temporary(like: Path | None) -> Path:
    """A temporary folder, removed when the process ends, with links to the files of ``like``."""
    held = contextlib.ExitStack()
    try:
        made = held.enter_context(scratch_folder())
    except OSError as error:
        raise OutOfSpace(
            f"compiled programs cannot be kept anywhere, not even in the temporary folder ({error.strerror}); give "
            f"--cache-dir or {VARIABLE}, or set TMPDIR to a folder that can be written"
        ) from error
    atexit.register(held.close)
    for part in PARTS:
        own = made / part
        own.mkdir()
        with contextlib.suppress(OSError):  # there is nothing, or nothing for this user
            for file in (like / part).iterdir() if like is not None else ():
                (own / file.name).symlink_to(file.absolute())
    return made
