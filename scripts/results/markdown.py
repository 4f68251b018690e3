"""Tables and figures as Markdown, and their places in a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MISSING = ""
"""A cell without a measurement."""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table; the first ``left`` columns hold text, the others numbers."""
    ruler = "|".join("---" if at < left else "---:" for at in range(len(head)))
    return "\n".join([f"| {' | '.join(head)} |", f"|{ruler}|", *(f"| {' | '.join(row)} |" for row in rows)])


def ratio(found: Mapping[str, float] | None) -> str:
    """A median with its 95 % interval: ``1.02 [0.97, 1.05]``."""
    if found is None:
        return MISSING
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def milliseconds(seconds: float) -> str:
    """Whole milliseconds from ten on, else with one decimal."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def optional(found: Mapping[str, Any], key: str, form: str) -> str:
    return f"{found[key]:{form}}" if found.get(key) is not None else MISSING


def fill_blocks(page: str, written: Mapping[str, str]) -> str:
    """The page with new text between each ``<!-- generated: NAME -->`` and the next ``<!-- end -->``.

    Raises ``ValueError`` for a block without new text.
    """
    if strange := {match.group(2) for match in BLOCK.finditer(page)} - written.keys():
        raise ValueError(f"expected blocks of {', '.join(written)}, found {', '.join(sorted(strange))}")
    return BLOCK.sub(lambda match: f"{match.group(1)}\n{written[match.group(2)]}\n\n{match.group(3)}", page)
