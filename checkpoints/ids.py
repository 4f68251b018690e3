"""Names that users choose: task ids, tenants, aliases. They are keys, and never become a path."""

from __future__ import annotations

import re

from jpets.errors import InvalidTask

ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,63}")
LATEST = "latest"
"""The alias that is always the newest activated version."""


def check_id(value: str, what: str = "task id") -> str:
    """``value`` where it may name a task or tenant. Raises ``InvalidTask``."""
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise InvalidTask(
            f"{what} must be 1 to 128 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit, "
            f"found {shown(value)}"
        )
    return value


def check_alias(value: str) -> str:
    """``value`` where it may name an alias that a user sets. Raises ``InvalidTask``."""
    if not isinstance(value, str) or not ALIAS.fullmatch(value) or value == LATEST:
        raise InvalidTask(
            f"alias must be 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter, and not {LATEST!r}, "
            f"found {shown(value)}"
        )
    return value


def shown(value: object) -> str:
    """A bad name for a message: its kind and length where it could be a path."""
    text = value if isinstance(value, str) else type(value).__name__
    return repr(text[:40]) if "/" not in text and "\\" not in text else f"{len(text)} characters with a slash"
