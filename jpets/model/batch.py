"""The device arrays of one macro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.numerics import AnyArray
from pallas_kernels.packed_attention import AttentionGroup


class Rows(NamedTuple):
    """Each row's first token, and how its tokens are pooled (index into ``POOLINGS``), both [N] in row order."""

    first_token: Int[Array, " n"]
    pooling: Int[Array, " n"]


POOLINGS = ("cls", "mean", "pooler")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """T packed tokens of N rows; ``inputs`` holds an array [T, ...] under each name that the model reads.

    Row order is the order of the attention groups' rows, one group after the other.

    In a rectangular bucket there is one group with ``tokens=None``, and ``cells`` and ``row_of_token`` are None.
    """

    inputs: Mapping[str, Shaped[Array, "t ..."]]
    positions: Int[Array, " t"]
    groups: tuple[AttentionGroup, ...]
    cells: Int[Array, " t"] | None
    row_of_token: Int[Array, " t"] | None
    rows: Rows

    @property
    def ids(self) -> Int[AnyArray, " t"]:
        return self.inputs["ids"]

    @property
    def types(self) -> Int[AnyArray, " t"]:
        return self.inputs["types"]

    @property
    def row_count(self) -> int:
        return sum(int(group.lengths.shape[0]) for group in self.groups)
