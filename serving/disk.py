"""What a disk may do to those who write to it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from jpets.errors import OutOfSpace


@contextlib.contextmanager
def space_errors() -> Iterator[None]:
    """Turns a full disk or quota into ``OutOfSpace``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace("the disk is full; free space or remove tasks, then try again") from error
        raise
