"""What fixtures of the command line's tests give."""

from __future__ import annotations

from collections.abc import Callable

from typer.testing import Result

from jpets.types import Task

Run = Callable[..., Result]
MakeTask = Callable[..., Task]
Store = tuple[str, str]
