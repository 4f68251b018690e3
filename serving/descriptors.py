"""File descriptors: how many connections they allow, and what is answered where there is none."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from jpets.errors import Saturated

EXHAUSTED = (errno.EMFILE, errno.ENFILE)
OTHERS = 0.25
"""Share of the descriptors that connections leave to files: tasks, programs, uploads, the catalogue, children."""
FEWEST = 8
"""Connections that are allowed in any case."""


def most_connections(wanted: int) -> int:
    """As many connections as are wanted, or as many as the process has descriptors for. What the system lets the
    process raise of their limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        with contextlib.suppress(ValueError, OSError):  # the system has a lower limit than it says (macOS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(FEWEST, min(wanted, int(soft * (1 - OTHERS)) - _open_now()))


@contextlib.contextmanager
def descriptor_errors() -> Iterator[None]:
    """Turns a lack of file descriptors into ``Saturated``."""
    try:
        yield
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise Saturated("the server has no file descriptor free; try again, or raise its limit") from error
        raise


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
