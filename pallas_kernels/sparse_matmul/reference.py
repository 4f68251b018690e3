"""Plain XLA: gather the inputs that meet a non-zero, scale them, add them up by column."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num, UInt16

from pallas_kernels.numerics import take_slots
from pallas_kernels.windows import Runs, over_runs


def sparse_matmul_reference(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    rows: UInt16[Array, "slots layers n"],
    cols: UInt16[Array, "slots layers n"],
    values: Num[Array, "slots layers n"],
    runs: Runs,
    size: int,
    layer: int,
) -> Float[Array, "t o"]:
    """See ``sparse_matmul``."""

    def body(x_window: Array, y_window: Array, slot: Array) -> Array:
        row = rows.at[slot, layer].get(mode="promise_in_bounds").astype(jnp.int32)
        col = cols.at[slot, layer].get(mode="promise_in_bounds").astype(jnp.int32)
        value = take_slots(values, slot[None], layer)[0].astype(jnp.float32)
        terms = x_window.T.astype(jnp.float32).at[row].get(mode="fill", fill_value=0) * value[:, None]
        sums = jnp.zeros((y_window.shape[1], x_window.shape[0]), jnp.float32)
        return y_window + sums.at[col].add(terms, indices_are_sorted=True, mode="drop").T

    return over_runs(x, y, runs, size, body)
