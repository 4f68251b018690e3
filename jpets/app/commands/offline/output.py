"""The output of an offline run: a file that grows by whole lines, and what is needed to go on after a break."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pydantic_core

from jpets.errors import Conflict

RECORD = ".run.json"
"""Appended to an output's name: the file that says what made it."""


class Output:
    """Answers as JSON lines; every one is with the operating system when ``write`` returns."""

    def __init__(self, file: BinaryIO, lines: int = 0, failed: int = 0) -> None:
        self.lines = lines
        self.failed = failed
        self._file = file

    def write(self, document: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self.lines += 1
        self.failed += has_error(document)


def has_error(document: Mapping[str, Any]) -> bool:
    """Whether a line, or one of its tasks, could not be answered."""
    return "error" in document or any("error" in each for each in document.get("results", {}).values())


@contextlib.contextmanager
def open_output(path: Path | None, record: Mapping[str, Any], *, resume: bool) -> Iterator[Output]:
    """Standard output for None, else a new file, or with ``resume`` one that an equal run began; a torn line goes.

    ``record`` is kept beside the file: all that decides its content. Raises ``Conflict`` for a file that exists
    without ``resume``, or that another run made.
    """
    if path is None:
        yield Output(sys.stdout.buffer)
    elif not path.exists():
        from jpets.files import write_atomic

        write_atomic(_beside(path), json.dumps(record, indent=2).encode() + b"\n")
        with path.open("xb") as file:
            _lock(path, file)
            yield Output(file)
    elif not resume:
        raise Conflict(f"{path} exists already; go on with it by --resume, or choose another file")
    else:
        _check(path, record)
        with path.open("r+b") as file:
            _lock(path, file)
            yield _resumed(path, file)


def _lock(path: Path, file: BinaryIO) -> None:
    """Raises ``Conflict`` where another process writes the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict(f"another run is writing {path}; wait for it, or choose another file") from None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + RECORD)


def _check(path: Path, record: Mapping[str, Any]) -> None:
    """Raises ``Conflict`` unless an equal run began ``path``."""
    beside = _beside(path)
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
        names = [name for name in record if before[name] != record[name]]
    except (OSError, ValueError, KeyError, TypeError):
        raise Conflict(
            f"{path} cannot be resumed: {beside.name} beside it does not say what made it; choose another file"
        ) from None
    if names:
        raise Conflict(f"{path} was begun with another {', '.join(names)}; give the same again, or choose another file")


def _resumed(path: Path, file: BinaryIO) -> Output:
    """Counts the whole lines, drops a torn one, and leaves ``file`` at its end."""
    output, end = Output(file), 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            document = pydantic_core.from_json(line)
            wrong = document["line"] != output.lines + 1
        except (ValueError, KeyError, TypeError):
            wrong = True
        if wrong:
            raise Conflict(f"line {output.lines + 1} of {path} is not what a run writes; choose another file")
        output.lines += 1
        output.failed += has_error(document)
        end += len(line)
    file.seek(end)
    file.truncate()
    return output
