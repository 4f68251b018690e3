"""Whether the numbers of a backbone can be computed with: finite, also in bfloat16, in which it is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from checkpoints.listing import listing
from jpets.errors import InvalidBackbone

LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def not_finite(array: npt.NDArray[Any]) -> str | None:
    """What of an array cannot be computed with, in words; without a copy of it."""
    low, high = np.min(array, initial=np.inf), np.max(array, initial=-np.inf)
    if np.isnan(low) or np.isnan(high):
        return "NaN"
    if high < low:
        return None  # empty
    largest = max(abs(float(low)), abs(float(high)))
    return "Inf" if np.isinf(largest) else f"{largest:.3g}" if largest > LARGEST else None


def check_finite(tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raises ``InvalidBackbone`` naming the tensors that hold NaN, Inf, or numbers that bfloat16 has no room for."""
    found = {name: what for name, array in tensors.items() if (what := not_finite(array)) is not None}
    if found:
        wrong = [f"{name[:120]}: expected finite numbers, found {what}" for name, what in found.items()]
        raise InvalidBackbone(
            f"the model cannot be computed with: {listing(wrong)}; download it again, or look how it was trained or "
            "merged"
        )
