"""File descriptors, memory and disk: how many connections they allow, and the answers where one has run out."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3

from jpets.errors import JpetsError, OutOfSpace, Saturated
from jpets.files import DISK_FULL, NO_SPACE

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
NO_MEMORY = (errno.ENOMEM, errno.EAGAIN)
NO_THREAD = "can't start new thread"
"""What Python says of it."""
OTHERS = 0.25
"""Share of the descriptors that connections leave to files: tasks, programs, uploads, the catalogue, children."""
FEWEST = 8
"""Connections that are allowed in any case."""


def most_connections(wanted: int) -> int:
    """As many connections as are wanted, or as many as the process has descriptors for. The process first raises their
    limit as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        with contextlib.suppress(ValueError, OSError):  # the system has a lower limit than it says (macOS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(FEWEST, min(wanted, int(soft * (1 - OTHERS)) - _open_now()))


def shortage(error: BaseException | None) -> JpetsError | None:
    """The error to answer with where ``error``, or its cause, is a lack of descriptors, memory, threads or space; None
    otherwise."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            return Saturated("the server has no file descriptor free; try again, or raise its limit")
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in NO_MEMORY):
            return Saturated("the server's host has no memory free; try again, or give it more")
        if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
            return Saturated("the server may start no more threads; try again, or raise its limit of processes")
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return OutOfSpace(DISK_FULL)
        if isinstance(error, sqlite3.OperationalError) and _lacks_descriptors(error):
            return Saturated("the catalogue cannot be opened, as the server has no file descriptor free; try again")
        error = error.__cause__ or error.__context__
    return None


def _lacks_descriptors(error: sqlite3.OperationalError) -> bool:
    """SQLite says only that it cannot open a file."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return False
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as now:
        return now.errno in NO_DESCRIPTOR
    return False


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
