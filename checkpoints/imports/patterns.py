"""Regular expressions of a checkpoint's settings, which come from strangers: some never end."""

from __future__ import annotations

import time

import regex  # type: ignore[import-untyped]

from jpets.errors import InvalidTask

SECONDS = 5.0
"""For all the matches of one checkpoint; ordinary ones take milliseconds."""


def is_pattern(text: str) -> bool:
    try:
        regex.compile(text)
    except (regex.error, RecursionError):
        return False
    return True


class Patterns:
    """Matches names while its time lasts."""

    def __init__(self) -> None:
        self._left = SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern fits the whole name; one that is none fits nothing. Raises ``InvalidTask`` when the time is
        spent."""
        start = time.monotonic()
        try:
            if self._left <= 0:
                raise TimeoutError
            return regex.fullmatch(pattern, name, timeout=self._left) is not None
        except (regex.error, RecursionError):
            return False
        except TimeoutError as error:
            raise InvalidTask(
                f"the pattern {pattern[:80]!r} takes too long to match module names; name the modules instead"
            ) from error
        finally:
            self._left -= time.monotonic() - start
