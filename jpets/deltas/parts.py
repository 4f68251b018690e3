"""Tensor parallelism inside a program (Shoeybi et al. 2019: Megatron-LM, section 3): what each of several devices has.

Each runs the program on its part of the weights: whole heads of query, key and value, and columns of the feed-forward
network. So ``attn_out`` and ``ffn_out`` give each device a part of a sum, and all devices add theirs up. A part is
recognised by its size: it is smaller than its site. On one device nothing is, and ``own_part`` and ``spread`` return
what they got.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, UInt8

from pallas_kernels.numerics import AnyArray

AXIS = "model"
"""The mesh axis over which the devices share a batch."""
BY_OUTPUTS = frozenset({"query", "key", "value", "ffn_in"})
"""Sites of which each device computes some outputs, from all inputs."""
BY_INPUTS = frozenset({"attn_out", "ffn_out"})
"""Sites of which each device has some inputs, and gets a part of the sum for every output."""


class Size(NamedTuple):
    """Of a linear site: its inputs and outputs."""

    inputs: int
    outputs: int


def by_device(fused: Float[AnyArray, "i o"], matrices: int, devices: int) -> Float[AnyArray, "i o"]:
    """Matrices that lie side by side, in the order of devices: each has its columns of the first, of the second, ..."""
    columns = fused.reshape(len(fused), matrices, devices, -1)
    return columns.swapaxes(1, 2).reshape(fused.shape)


def own_part(whole: Num[Array, "*b o"], size: int) -> Num[Array, "*b p"]:
    """This device's ``size`` of the last axis."""
    if whole.shape[-1] == size:
        return whole
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(AXIS) * size, size, axis=-1)


def spread(part: Num[Array, "*b p"], size: int) -> Num[Array, "*b o"]:
    """The inverse of ``own_part``: zeros in the other devices' places. For operators that know only whole matrices."""
    size_here = part.shape[-1]
    if size_here == size:
        return part
    zeros = jnp.zeros((*part.shape[:-1], size), part.dtype)
    at = jax.lax.axis_index(AXIS) * size_here
    return jax.lax.dynamic_update_slice_in_dim(zeros, part, at, axis=-1)


def summed(part: Num[Array, "*b"]) -> Num[Array, "*b"]:
    """The sum of all devices' parts, the same bits on each."""
    total: Array = jax.lax.psum(part, AXIS)
    return total


def regroup_planes(bits: UInt8[Array, "*b c"], groups: int, into: int) -> UInt8[Array, "*b c"]:
    """Bit planes of so many groups of columns in a row, as planes of ``into`` groups: a device that has a group has the
    bits of neighbouring columns. Planes of all columns are one group. ``c`` is a multiple of both."""
    *lead, size = bits.shape
    shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
    columns = (bits.reshape(*lead, groups, 1, size // groups) >> shifts) & 1
    planes = columns.reshape(*lead, into, 8, size // into) << shifts
    return planes.sum(-2, dtype=jnp.uint8).reshape(*lead, size)
