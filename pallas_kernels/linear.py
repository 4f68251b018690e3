"""``linear``: the product of all tokens with a weight that they share, in the number format that its readers are
fastest with.

A GPU's tensor cores are fed faster than its memory takes f32 results: a product of BERT-base's ``ffn_in`` on 16,384
tokens writes 201 MB of them, and the activation reads them again. In the format of the weight that is half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.gates import Gate
from pallas_kernels.numerics import dot
from pallas_kernels.windows import REFERENCE


def linear_narrow(x: Float[Array, "*b i"], w: Float[Array, "i o"]) -> Float[Array, "*b o"]:
    """x W, accumulated in f32 and rounded to the format of a 16-bit ``w`` once."""
    if not _takes(x, w):
        return dot(x, w)
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x.astype(w.dtype), w, axes, preferred_element_type=w.dtype)


LINEAR: Mapping[str, Callable[..., Array]] = {REFERENCE: dot, "narrow": linear_narrow}
"""What may compute it, by name: the reference gives f32."""


def linear(x: Float[Array, "*b i"], w: Float[Array, "i o"], candidate: str = REFERENCE) -> Float[Array, "*b o"]:
    """x W in the precision of W."""
    return LINEAR[candidate](x, w)


def _takes(x: Any, w: Any) -> bool:
    del x
    return bool(w.dtype.itemsize == 2)


GATES: Mapping[str, Mapping[str, Gate]] = {"linear": {"narrow": Gate(takes=_takes, sizes="16-bit weights")}}
"""By operator and candidate."""
