"""Resident memory of a server over many requests: how much it grows, and at which requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

STEP = 8e6
"""Growth in bytes between two samples from which on the place is reported."""


@dataclasses.dataclass
class Growth:
    """Samples of (requests, bytes of resident memory, programs that were compiled until then)."""

    samples: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def add(self, requests: int, resident: int, programs: int) -> None:
        self.samples.append((requests, resident, programs))

    def figures(self) -> dict[str, Any]:
        """Megabytes (10^6 bytes). ``by_fifths``: means over each fifth of the requests. ``steps``: where it grew at
        once."""
        if len(self.samples) < 10:
            raise ValueError(f"expected at least 10 samples, found {len(self.samples)}; measure over more requests")
        requests, resident, programs = (np.array(column, float) for column in zip(*self.samples, strict=True))
        fifths = [float(part.mean()) for part in np.array_split(resident, 5)]
        grown = fifths[-1] - fifths[0]
        between = 0.8 * (requests[-1] - requests[0])  # from the middle of the first fifth to that of the last
        steps = [
            {"requests": int(requests[at + 1]), "mb": change / 1e6, "programs": int(programs[at + 1] - programs[at])}
            for at, change in enumerate(np.diff(resident))
            if change > STEP
        ]
        return {
            "requests": int(requests[-1] - requests[0]),
            "by_fifths_mb": [fifth / 1e6 for fifth in fifths],
            "grown_mb": grown / 1e6,
            "grown_mb_per_100000": grown / between * 1e5 / 1e6,
            "programs": int(programs[-1] - programs[0]),
            "steps": steps,
        }
