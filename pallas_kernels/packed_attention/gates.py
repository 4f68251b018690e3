"""Which devices and operands cuDNN takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_kernels.gates import Gate


def _takes(q: Any, k: Any, v: Any, groups: Any, cells: Any, heads: int, *rest: Any, **settings: Any) -> bool:
    from pallas_kernels.packed_attention.cudnn import takes

    del k, v, groups, cells, rest, settings
    return takes(q, heads)


CUDNN = Gate(
    frozenset({"gpu"}), least=(8, 0), takes=_takes, sizes="16-bit numbers, heads of 8 to 128 in multiples of 8"
)
GATES: Mapping[str, Mapping[str, Gate]] = {"packed_attention": {"cudnn": CUDNN}}
"""By operator and candidate."""
