"""``low_rank``: for each group g of rows,

h[g] = act(x[g] @ down[slots[g], layer] + down_bias[slots[g], layer])
y[g] =     h[g] @ up[slots[g], layer]   + up_bias[slots[g], layer]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float, Int, Num

from pallas_kernels.low_rank.reference import low_rank_reference
from pallas_kernels.numerics import LayerIndex
from pallas_kernels.windows import REFERENCE


def _mosaic(*operands: Any, **settings: Any) -> Array:
    from pallas_kernels.low_rank.mosaic import low_rank_mosaic, takes  # a quarter of a second, for GPUs alone

    taken = takes(*operands[:3])
    return low_rank_mosaic(*operands, **settings) if taken else low_rank_reference(*operands, **settings)


CANDIDATES: Mapping[str, Callable[..., Array]] = {REFERENCE: low_rank_reference, "mosaic": _mosaic}
"""What may compute it, by name: each takes all operands, and leaves what it cannot compute to another candidate."""


def low_rank(
    x: Float[Array, "g s i"],
    down: Num[Array, "slots layers i r"],
    up: Num[Array, "slots layers r o"],
    slots: Int[Array, " g"],
    layer: LayerIndex,
    *,
    activation: str = "identity",
    down_bias: Num[Array, "slots layers r"] | None = None,
    up_bias: Num[Array, "slots layers o"] | None = None,
    candidate: str = REFERENCE,
) -> Float[Array, "g s o"]:
    """Low-rank product of each group with its own slot's matrices, f32 [g, s, o].

    Banks hold f32, or bf16 as uint16. LoRA (Hu et al. 2021) with its scale folded into ``up``; with an activation and
    biases the bottleneck adapter (Houlsby et al. 2019; PetS section 2.3).
    """
    compute = CANDIDATES[candidate]
    return compute(x, down, up, slots, layer, activation=activation, down_bias=down_bias, up_bias=up_bias)
