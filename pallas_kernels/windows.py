"""A loop over the runs of tokens that belong to heavy tasks: one executable for any number of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Runs(NamedTuple):
    """``used`` runs of tokens, each of one task. Run k covers tokens ``start[k] + offset[k] + [0, length[k])``.

    A window of ``size`` tokens is read at ``start[k]``, which the host has clamped so that it never leaves the batch.
    """

    used: Int[Array, ""]
    slots: Int[Array, " k"]
    starts: Int[Array, " k"]
    offsets: Int[Array, " k"]
    lengths: Int[Array, " k"]


def over_runs(
    x: Float[Array, "t i"],
    y: Float[Array, "t o"],
    runs: Runs,
    size: int,
    body: Callable[[Float[Array, "s i"], Float[Array, "s o"], Int[Array, ""]], Float[Array, "s o"]],
) -> Float[Array, "t o"]:
    """``y`` with each run's tokens replaced by ``body(x_window, y_window, slot)``; other tokens keep their bits."""

    def step(k: Int[Array, ""], out: Float[Array, "t o"]) -> Float[Array, "t o"]:
        start = runs.starts[k]
        x_window = jax.lax.dynamic_slice_in_dim(x, start, size)
        y_window = jax.lax.dynamic_slice_in_dim(out, start, size)
        at = jnp.arange(size) - runs.offsets[k]
        own = (at >= 0) & (at < runs.lengths[k])
        result = jnp.where(own[:, None], body(x_window, y_window, runs.slots[k]), y_window)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return jax.lax.fori_loop(0, runs.used, step, y)
