"""Background compilation in a child process of low priority, so that traffic hardly notices it.

The child compiles and writes to the program store; the parent only loads the result. Run as
``python -m jpets.engine.background STORE``; the first line of standard input is the family, each further one a program.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import jax

from jpets.engine.program import (
    Family,
    Program,
    ProgramKey,
    ProgramStore,
    compile_program,
    family_from_json,
    key_from_json,
    key_to_json,
)

log = logging.getLogger(__name__)

MOST_PROGRAMS = 40
"""Added in the background; each keeps about 16 MB of host memory (MiniLM)."""
MOST_WANTED = 1024
WANTED_OFTEN = 16
"""Batches that must have missed a program before it is compiled."""


class BackgroundCompiler:
    """First the ``queue`` given at start, then whatever batches keep missing. ``add`` receives each loaded program."""

    def __init__(
        self, family: Family, store: ProgramStore, folder: pathlib.Path, add: Callable[[Program], None], platform: str
    ) -> None:
        self._family = family
        self._store = store
        self._folder = folder
        self._add = add
        self._platform = platform
        self._queue: list[ProgramKey] = []
        self._wanted: Counter[ProgramKey] = Counter()
        self._asked: set[ProgramKey] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._child: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name="jpets-compile", daemon=True)
        self.compiled = 0
        self.failed = 0

    def start(self, queue: Iterable[ProgramKey]) -> None:
        self._queue = list(queue)
        self._asked = set(self._queue)
        self._thread.start()

    def want(self, key: ProgramKey) -> None:
        """Notes that a batch would have run better in ``key``."""
        with self._changed:
            if key not in self._asked and len(self._asked) < MOST_PROGRAMS:
                if len(self._wanted) > MOST_WANTED:
                    self._wanted = Counter(dict(self._wanted.most_common(MOST_PROGRAMS)))
                self._wanted[key] += 1
                if self._wanted[key] == WANTED_OFTEN:
                    self._asked.add(key)
                    self._queue.append(key)
                    self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._busy

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._child is not None:
            self._child.kill()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        if self._child is not None:
            with contextlib.suppress(OSError), self._child:  # closes its pipes and waits for its end
                pass

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                key = self._queue.pop(0)
                self._busy = True
            try:
                program = self._store.load(self._family, key) or self._compile(key)
                if program is None:
                    self.failed += 1
                elif not self._closed:
                    self._add(program)
                    self.compiled += 1
            except Exception:  # one program less; the queries run in others
                log.exception("a program could not be added")
                self._store.forget(self._family, key)
                self.failed += 1
            self._busy = False

    def _compile(self, key: ProgramKey) -> Program | None:
        try:
            child = self._running_child()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(key_to_json(key) + "\n")
            child.stdin.flush()
            if child.stdout.readline().strip() == "done":
                return self._store.load(self._family, key)
        except OSError:
            pass  # the child died; counted, and the next program starts a fresh one
        return None

    def _running_child(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            root = str(pathlib.Path(__file__).parents[2])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._child = subprocess.Popen(
                [sys.executable, "-m", "jpets.engine.background", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "JAX_PLATFORMS": self._platform,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the device's memory belongs to the parent
                },
            )
            assert self._child.stdin is not None
            self._child.stdin.write(self._family.to_json() + "\n")
        return self._child


def main() -> None:
    """The child: compiles what it is told until standard input ends."""
    with contextlib.suppress(OSError):
        os.nice(19)
    folder = pathlib.Path(sys.argv[1])
    store = ProgramStore(folder, jax.local_devices()[0])
    family = family_from_json(sys.stdin.readline())
    for line in sys.stdin:
        store.save(family, compile_program(family, key_from_json(line)))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
