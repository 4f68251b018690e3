"""``packed_attention``: each query attends to its own tokens; queries lie one after the other in [t, d]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Array, Float, Int

from pallas_kernels.packed_attention.cudnn import packed_attention_cudnn
from pallas_kernels.packed_attention.reference import AttentionGroup, Prefix, packed_attention_reference
from pallas_kernels.windows import REFERENCE

__all__ = ["CANDIDATES", "AttentionGroup", "Prefix", "packed_attention"]

CANDIDATES: Mapping[str, Callable[..., Array]] = {
    REFERENCE: packed_attention_reference,
    "cudnn": packed_attention_cudnn,
}
"""What may compute it, by name."""


def packed_attention(
    q: Float[Array, "t d"],
    k: Float[Array, "t d"],
    v: Float[Array, "t d"],
    groups: tuple[AttentionGroup, ...],
    cells: Int[Array, " t"] | None,
    heads: int,
    prefixes: Sequence[Prefix] = (),
    candidate: str = REFERENCE,
) -> Float[Array, "t d"]:
    """Multi-head self-attention, in the dtype of ``q`` with f32 scores and softmax.

    ``groups`` hold the queries padded to [N, L] each (at most three: one long text among short ones in a single view
    costs 20 x). ``cells[t]`` is token t's place in the flattened groups; what a token of no query gets means nothing.
    Rows also attend to their part of each of ``prefixes``, whose rows stand in the order of the groups'.
    With one group of ``tokens=None`` the tokens already are [N, L], and nothing is gathered.
    """
    return CANDIDATES[candidate](q, k, v, groups, cells, heads, prefixes)
