"""What load over HTTP a system keeps, from a curve of those that were tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Sustained(NamedTuple):
    """Requests a second, and the part of the reference's at the same time that they are (None: not compared so)."""

    rate: float
    load: float | None


def sustained(curve: Sequence[Mapping[str, Any]], target: float) -> Sustained:
    """The highest rate up to which every p99 keeps the target, in seconds: between two that were tried by their p99
    (linear)."""
    compared = curve[0].get("load") is not None
    keys = ("rate", "load") if compared else ("rate",)
    for before, point in itertools.pairwise([{"rate": 0.0, "load": 0.0, "p99": 0.0}, *curve]):
        if not point["p99"] <= target:  # older files have NaN where requests failed
            finite = math.isfinite(point["p99"])
            share = (target - before["p99"]) / (point["p99"] - before["p99"]) if finite else 0.0
            found = [before[key] + share * (point[key] - before[key]) for key in keys]
            break
    else:
        found = [curve[-1][key] for key in keys]
    return Sustained(found[0], found[1] if compared else None)
