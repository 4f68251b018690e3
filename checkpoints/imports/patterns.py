"""Regular expressions of a checkpoint's settings, which come from strangers: some never end, or fill the memory."""

from __future__ import annotations

import math
import re
import time
import warnings
from typing import Any

import regex  # type: ignore[import-untyped]

from jpets.errors import InvalidTask

SECONDS = 5.0
"""For all the matches of one checkpoint; ordinary ones take milliseconds."""
MOST_STEPS = 100_000
"""That a pattern may have with its repetitions written out, as ``regex`` does: each takes up to a kilobyte."""
ESCAPED = re.compile(r"\\.", re.DOTALL)
GROUP_TIMES = re.compile(r"\)(?:\+|\{(\d+))")
COUNTS = re.compile(r"\d+(?=,?\d*\})")
HIDES_COUNTS = re.compile(r"\{(?!\d*,?\d*\})|\(\?[a-zA-Z-]*x|\(\?#")
"""Braces that are no count, verbose patterns and comments: behind them ``COUNTS`` and ``GROUP_TIMES`` may miss some."""


def is_pattern(text: str) -> bool:
    """Raises ``InvalidTask`` for a pattern that would fill the memory."""
    return _compiled(text) is not None


class Patterns:
    """Matches names while its time lasts."""

    def __init__(self) -> None:
        self._left = SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern fits the whole name; an invalid pattern fits nothing. Raises ``InvalidTask`` when the time
        is spent, and for a pattern that would fill the memory."""
        start = time.monotonic()
        try:
            if self._left <= 0:
                raise TimeoutError
            compiled = _compiled(pattern)
            return compiled is not None and compiled.fullmatch(name, timeout=self._left) is not None
        except (TimeoutError, MemoryError) as error:
            raise InvalidTask(
                f"the pattern {pattern[:80]!r} takes too long to match module names; name the modules instead"
            ) from error
        finally:
            self._left -= time.monotonic() - start


def _compiled(text: str) -> Any:
    """None for a text that is no pattern to Python's ``re``, which the library matches with: it has no recursion,
    say."""
    plain = ESCAPED.sub("_", text)
    if HIDES_COUNTS.search(plain) or _steps(plain) > MOST_STEPS:
        raise InvalidTask(
            f"the pattern {text[:80]!r} is too long, repeats groups too often, or has comments or braces that are no "
            "count; name the modules instead"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that a later Python may read otherwise
            re.compile(text)
        return regex.compile(text)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError):
        return None


def _steps(plain: str) -> float:
    """At least what a pattern has when all is written out: every repeated group counts as if it lay in all others."""
    nested = math.prod(float(count or 1) + 1 for count in GROUP_TIMES.findall(plain))
    return nested * (len(plain) + sum(map(float, COUNTS.findall(plain))))
