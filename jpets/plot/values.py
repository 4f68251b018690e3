"""How vectors of n-grams are stored: in bf16, or in 8 bits with a scale for each block of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from jpets.config import SCALED, TableFormat, stored_dtype, stored_width
from jpets.errors import InvalidInput

FLOAT8 = ml_dtypes.float8_e4m3fn
LARGEST, LARGEST_EXPONENT = float(ml_dtypes.finfo(FLOAT8).max), 8
BIAS = 127
"""Of a scale: an exponent of two in 8 bits (E8M0)."""


def check_format(given: TableFormat, width: int) -> None:
    """Raises ``InvalidInput`` where vectors of so many numbers cannot be stored so."""
    if given == "float8" and width % SCALED:
        raise InvalidInput(f"vectors in 8 bits must have a multiple of {SCALED} numbers, found {width}")


def row_bytes(given: TableFormat, vectors: int, width: int) -> int:
    """Bytes of an entry."""
    return vectors * stored_width(given, width) * np.dtype(stored_dtype(given)).itemsize


def stored(values: Float[np.ndarray, "k p d"], given: TableFormat) -> Shaped[np.ndarray, "k p e"]:
    """Vectors as a table holds them; ``jpets.model.merging.numbers`` is the inverse.

    In 8 bits the scale of a block is the power of two below its largest number, over that below the largest E4M3
    number; what is above that one is cut (OCP Microscaling Formats 1.0, section 6.3). Raises ``InvalidInput`` for
    numbers that are not finite.
    """
    if not np.isfinite(values).all():
        raise InvalidInput("vectors of n-grams are not finite: their layers diverged; train them again")
    if given == "bfloat16":
        return values.astype(stored_dtype(given))
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], -1, SCALED)
    _, exponents = np.frexp(np.abs(blocks).max(-1))  # a number below 2^exponent, at least half of it
    scales = np.clip(exponents - 1 - LARGEST_EXPONENT, 1 - BIAS, BIAS)
    codes = np.clip(np.ldexp(blocks, -scales[..., None]), -LARGEST, LARGEST).astype(FLOAT8)
    flat = codes.view(np.uint8).reshape(values.shape)
    return np.concatenate([flat, (scales + BIAS).astype(np.uint8)], -1)
