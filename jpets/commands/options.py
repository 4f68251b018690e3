"""Options that several commands read alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

SUFFIX = ".safetensors"


def check_task_output(path: Path) -> None:
    """What would keep a task from being written in the end. Raises ``typer.BadParameter``."""
    if path.suffix != SUFFIX:
        raise typer.BadParameter(f"--output must be a file that ends in {SUFFIX}, found {path.name!r}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"--output: there is no folder {path.parent.name!r}")


def named(given: Sequence[str]) -> dict[str, str]:
    """What ``--set NAME=VALUE`` gave, the last of a name. Raises ``typer.BadParameter``."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--set must be NAME=VALUE, found {each!r}")
        found[name] = value
    return found
