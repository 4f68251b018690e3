"""A loop over the runs of tokens that belong to heavy tasks: one program for any number of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


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
    body: Callable[..., Float[Array, "s o"]],
    *shared: Num[Array, " ..."],
) -> Float[Array, "t o"]:
    """``y`` with each run's tokens replaced by ``body(x_window, y_window, slot, *shared)``; others keep their bits.

    ``shared`` is what every run reads as a whole.
    """

    def step(k: Int[Array, ""], out: Float[Array, "t o"]) -> Float[Array, "t o"]:
        # Ties them to the step. Otherwise XLA takes their conversions out of the loop, and each writes a full copy.
        k, inputs, *whole = jax.lax.optimization_barrier((k, x, *shared))
        start = runs.starts[k]
        x_window = jax.lax.dynamic_slice_in_dim(inputs, start, size)
        y_window = jax.lax.dynamic_slice_in_dim(out, start, size)
        at = jnp.arange(size) - runs.offsets[k]
        own = (at >= 0) & (at < runs.lengths[k])
        result = jnp.where(own[:, None], body(x_window, y_window, runs.slots[k], *whole), y_window)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return jax.lax.fori_loop(0, runs.used, step, y)
