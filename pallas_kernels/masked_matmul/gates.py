"""Which devices and operands the kernel for Hopper takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_kernels.gates import Gate, hopper

SIZES = "bf16, inputs in multiples of 64 and outputs in multiples of 256"


def _masked(x: Any, y: Any, w: Any, bits: Any, *rest: Any, **settings: Any) -> bool:
    from pallas_kernels.masked_matmul.mosaic import takes

    del y, w, rest, settings
    return takes(x, bits)


def _signed(x: Any, y: Any, bits: Any, *rest: Any, **settings: Any) -> bool:
    from pallas_kernels.masked_matmul.mosaic import takes

    del y, rest, settings
    return takes(x, bits)


GATES: Mapping[str, Mapping[str, Gate]] = {
    "masked_matmul": {"mosaic": hopper(_masked, SIZES)},
    "sign_matmul": {"mosaic": hopper(_signed, SIZES)},
}
"""By operator and candidate."""
