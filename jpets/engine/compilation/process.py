"""The process that compiles beside the traffic: at low priority, unless batches lose much meanwhile.

It compiles and writes to the program store; the server only loads the result. Run as
``python -m jpets.engine.compilation.process STORE DEVICE...``, with the devices' numbers; each line of
standard input is a family, or a program of the latest one.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time

import jax

from jpets.engine.programs.child import renice, start_child
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, compile_program, key_from_json, key_to_json
from jpets.engine.programs.store import ProgramStore, settings_as_variables
from jpets.engine.workloads.registry import family_from_json

IDLE = 19
"""Niceness of what can wait: it takes a sixtieth of a core that is busy."""
HURRIED = 0
"""Niceness while batches lose much for want of programs: as the server itself, or the traffic that needs them would
keep them from coming."""
TRIES = 2
"""Immediate tries of a program: the process that compiled it may have died for another reason (it was killed, memory
was short)."""


class CompilingProcess:
    """One process, which is started when it is needed. ``folder`` is the store's."""

    def __init__(self, store: ProgramStore, folder: pathlib.Path, mesh: MeshSlice) -> None:
        self._store = store
        self._folder = folder
        self._mesh = mesh
        self._settings = settings_as_variables()
        self._process: subprocess.Popen[str] | None = None
        self._niceness = 0
        self._family: Family | None = None
        """The family that the process was told last."""
        self._lock = threading.Lock()
        """Held while the process compiles a program, or ends."""
        self._closed = False
        self._used = time.monotonic()
        """When a program last came."""
        self._may_hurry = True
        self._unless: threading.Event | None = None
        """What the present compilation is given up by."""
        self._renicing = threading.Lock()

    def hurry(self) -> bool:
        """Lets what is compiled now, if anything, end sooner: batches lose much, for want of it or of another one.
        Returns whether it does: a process without rights cannot take back its own low priority."""
        process = self._process
        if process is not None and self._niceness > HURRIED and self._may_hurry:
            self._may_hurry = self._renice(process, HURRIED)  # if not, it is not asked again at every batch
        return process is None or self._niceness <= HURRIED

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def runs(self) -> bool:
        return self._process is not None

    def compile(
        self, family: Family, key: ProgramKey, *, niceness: int = IDLE, unless: threading.Event | None = None
    ) -> float | None:
        """Puts a program into the store. Returns the processor seconds that it took; None where the process died, or
        was closed, and where it was given up by ``unless``."""
        with self._lock:
            self._unless = unless
            try:
                return self._compiled(family, key, niceness, unless or threading.Event())
            finally:
                self._unless = None

    def _compiled(self, family: Family, key: ProgramKey, niceness: int, unless: threading.Event) -> float | None:
        for _ in range(TRIES):
            if self._closed or unless.is_set():
                return None
            process = self._running(niceness)
            if self._closed or unless.is_set():  # while it was started
                return None
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):  # the process died
                if self._family != family:
                    process.stdin.write(family.to_json() + "\n")
                process.stdin.write(key_to_json(key) + "\n")
                process.stdin.flush()
                self._family = family
                if taken := process.stdout.readline():
                    self._used = time.monotonic()
                    return float(taken)
            self._end()
            self._store.sweep_of(process.pid)
        return None

    def give_up(self, unless: threading.Event) -> None:
        """Ends the compilation that has this ``unless``, now or once it begins: another program is needed more."""
        unless.set()
        if self._unless is unless and (process := self._process) is not None:
            process.kill()

    def end_if_idle(self, seconds: float) -> None:
        """Frees its memory if it has compiled nothing for so long."""
        if self._lock.acquire(blocking=False):
            try:
                if self._process is not None and time.monotonic() - self._used >= seconds:
                    self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Ends it, whatever it does, for good."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:  # closes the pipes and waits for the end
                pass

    def _running(self, niceness: int) -> subprocess.Popen[str]:
        if self._process is not None and not self._renice(self._process, niceness):
            self._end()
        if self._process is None or self._process.poll() is not None:
            self._process, self._niceness, self._family = self._start(), 0, None
            self._renice(self._process, niceness)
        return self._process

    def _renice(self, process: subprocess.Popen[str], niceness: int) -> bool:
        """Whether the process has this niceness now."""
        with self._renicing:
            if niceness != self._niceness and not renice(process, niceness):
                return False
            self._niceness = niceness
            return True

    def _start(self) -> subprocess.Popen[str]:
        module, folder = "jpets.engine.compilation.process", str(self._folder)
        return start_child(module, [folder], self._mesh.devices, self._settings)


def main() -> None:
    """The process: compiles the programs on standard input until that ends; reports the processor time of each."""
    folder = pathlib.Path(sys.argv[1])
    devices = jax.local_devices()
    mesh = MeshSlice([devices[int(number)] for number in sys.argv[2:]])
    store = ProgramStore(folder, mesh)
    family: Family | None = None
    with contextlib.suppress(BrokenPipeError):  # the server was killed
        for line in sys.stdin:
            if "kind" in json.loads(line):
                family = family_from_json(line)
                continue
            assert family is not None
            begun = time.process_time()
            store.save(family, compile_program(family, key_from_json(line), mesh))
            sys.stdout.write(f"{time.process_time() - begun}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
