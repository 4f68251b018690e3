"""Options that several commands read alike."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def named(given: Sequence[str]) -> dict[str, str]:
    """What ``--set NAME=VALUE`` gave, the last of a name. Raises ``typer.BadParameter``."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--set must be NAME=VALUE, found {each!r}")
        found[name] = value
    return found
