"""x (W . M) for rows whose task masks the shared weight, and s (x sign(D)): one bit a weight."""

from pallas_kernels.masked_matmul.api import (
    MASKED,
    SIGNED,
    apply_mask,
    masked_matmul,
    pack_planes,
    sign_matmul,
    signs,
)
from pallas_kernels.masked_matmul.gates import GATES

__all__ = ["GATES", "MASKED", "SIGNED", "apply_mask", "masked_matmul", "pack_planes", "sign_matmul", "signs"]
