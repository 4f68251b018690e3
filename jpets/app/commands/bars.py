"""How far long work is: bars on a terminal, a line every ten seconds where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task

TOLD_EVERY = 10.0
"""Seconds between two lines: a command that is silent for longer is taken for dead."""
COUNTED = 1_000_000
"""Total from which on a line shows per cent: it counts bytes."""


class Bars(Progress):
    """Bars on standard error that go when they are done. Where it is no terminal, a thread calls ``tell`` with the work
    that goes on, also while that work makes no step."""

    def __init__(self, *columns: ProgressColumn, enabled: bool = True, tell: Callable[[Task], None] | None = None):
        console = Console(stderr=True)
        self.on_terminal = console.is_terminal
        super().__init__(
            *Progress.get_default_columns(),
            *columns,
            console=console,
            transient=True,
            disable=not (enabled and self.on_terminal),
        )
        self._tell = tell or _print
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._work, name="jpets-progress", daemon=True)

    def start(self) -> None:
        super().start()
        if not self.on_terminal:
            self._teller.start()

    def stop(self) -> None:
        self._ended.set()
        if self._teller.is_alive():
            self._teller.join()
        super().stop()

    def _work(self) -> None:
        while not self._ended.wait(TOLD_EVERY):
            tasks = self.tasks
            going = [task for task in tasks if not task.finished] or tasks[-1:]  # what comes next has no name yet
            for task in going:
                self._tell(task)


def done_of(task: Task) -> str:
    """``3/20``, ``41 %``, or nothing where it is not known how far work is."""
    if task.total is None:
        return ""
    if task.total >= COUNTED:
        return f"{task.percentage:.0f} %"
    return f"{task.completed:.0f}/{task.total:.0f}"


def _print(task: Task) -> None:
    said = ", ".join(filter(None, [done_of(task), f"{task.elapsed or 0:.0f} s"]))
    typer.echo(f"{task.description}: {said}", err=True)
