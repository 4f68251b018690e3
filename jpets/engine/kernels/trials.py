"""Trials in a process of their own: a candidate that crashes or hangs ends that process, not the server.

The process gets what to try as one line, and answers in lines: the name of each candidate before it is tried, then what
was found, or that nothing was. So what it died of is known. Candidates that it did not come to are tried at the next
start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from jpets.engine.kernels.trial import Outcome

log = logging.getLogger(__name__)

SECONDS = 60.0
"""Time for all trials of a start."""
TRY_SECONDS = 20.0
"""Time for one candidate of one shape; it takes two or three to compile."""
START_SECONDS = 45.0
"""Time in which the process must name its first candidate: it starts JAX on the device."""

TRYING = "trying"
Name = tuple[str, str, str]
"""Operator, shape and candidate."""
Start = Callable[[Sequence[Name]], "subprocess.Popen[str]"]


def run_trials(
    wanted: Sequence[Name],
    start: Start,
    seconds: float = SECONDS,
    try_seconds: float = TRY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Mapping[Name, Outcome]:
    """What was found of ``wanted`` within the time, in their order. ``start`` begins a process that tries the rest."""
    found: dict[Name, Outcome] = {}
    end = clock() + seconds
    while (left := [name for name in wanted if name not in found]) and clock() < end:
        before = len(found)
        with _ended(start(left)) as process:
            _follow(process, found, end, try_seconds, clock)
        if len(found) == before or process.returncode == 0:
            break  # it died before it tried anything, the time is up, or it did all that it could
    return found


def _follow(
    process: subprocess.Popen[str],
    found: dict[Name, Outcome],
    end: float,
    try_seconds: float,
    clock: Callable[[], float],
) -> None:
    """Takes the process's lines until it ends, the time is up, or one candidate takes too long."""
    assert process.stdout is not None
    lines = _lines_of(process.stdout)
    trying: Name | None = None
    began = False
    until = min(end, clock() + START_SECONDS)
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - clock()))
        except queue.Empty:
            if trying is not None and until < end:
                found[trying] = Outcome(out=f"was not done within {try_seconds:g} s")
            elif not began:
                log.warning("the process that tries kernels did not start in time; they are tried at the next start")
            return
        if line is None:
            code = process.wait()
            if trying is not None:
                found[trying] = Outcome(out=f"ended the process that tried it ({_ending(code)})")
            elif code:
                log.warning("the process that tries kernels ended (%s)", _ending(code))
            return
        told = _told(line)
        if told is None:
            continue
        began = True
        name, what = told
        if what == TRYING:
            trying, until = name, min(end, clock() + try_seconds)
        else:
            trying, until = None, end
            if isinstance(what, Outcome):
                found[name] = what


def trying_line(name: Name) -> str:
    return json.dumps({TRYING: name})


def left_line(name: Name) -> str:
    """Nothing was found of a candidate."""
    return json.dumps({"left": name})


def found_line(name: Name, outcome: Outcome) -> str:
    return json.dumps({"found": name, **outcome._asdict()})


def _told(line: str) -> tuple[Name, Outcome | str] | None:
    """A line of the process; None for one of another origin, such as a library's."""
    try:
        data: dict[str, Any] = json.loads(line)
        for what in (TRYING, "left"):
            if what in data:
                return _name(data[what]), what
        return _name(data["found"]), Outcome(float(data["seconds"]), float(data["ratio"]), str(data["out"]))
    except (ValueError, KeyError, TypeError):
        return None


def _name(parts: Sequence[str]) -> Name:
    operator, shape, candidate = parts
    return str(operator), str(shape), str(candidate)


def _lines_of(stream: IO[str]) -> queue.Queue[str | None]:
    """Lines as they come; None at the end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # the stream was closed
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="jpets-trials", daemon=True).start()
    return lines


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Any:
    """Kills the process at the end, and waits for it."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
