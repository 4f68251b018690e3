"""Problems in one sentence: of a kind that has many, the first few and how many there are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

FEW = 8
"""Problems of one kind that are all listed."""
SHOWN = 3
"""Problems shown of a kind that has more."""
LONGEST = 300
"""Characters shown of one problem."""
KINDS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "missing": re.compile(r"found nothing$"),
        "not understood": re.compile(r": not understood"),
        "not finite": re.compile(r": expected finite numbers"),
        "of other types": re.compile(r": expected floating-point numbers"),
        "of other shapes": re.compile(r": expected \[.*found \["),
    }
)
"""What many tensors may have in common."""


def listing(problems: Sequence[str]) -> str:
    """Problems of one kind stand together, behind the others."""
    kinds: dict[str, list[str]] = {"": [], **{kind: [] for kind in KINDS}}
    for problem in problems:
        kinds[next((kind for kind, sign in KINDS.items() if sign.search(problem)), "")].append(problem[:LONGEST])
    parts = []
    for kind, found in kinds.items():
        shown = found[:SHOWN] if kind and len(found) > FEW else found
        more = [f"and {len(found) - len(shown)} more that are {kind}"] if len(found) > len(shown) else []
        parts += [*shown, *more]
    return "; ".join(parts)
