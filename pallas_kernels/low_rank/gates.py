"""Which devices and operands the kernel for Hopper takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_kernels.gates import Gate, hopper


def _takes(x: Any, down: Any, up: Any, *rest: Any, **settings: Any) -> bool:
    from pallas_kernels.low_rank.mosaic import takes

    del rest, settings
    return takes(x, down, up)


SIZES = "bf16, inputs in multiples of 64, outputs in multiples of 32, and ranks up to 128"
GATES: Mapping[str, Mapping[str, Gate]] = {"low_rank": {"mosaic": hopper(_takes, SIZES)}}
"""By operator and candidate."""
