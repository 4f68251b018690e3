"""Runs of tokens that belong to heavy tasks: one program for any number of them.

A loop over the runs computes no more than there are; it is for CPUs. On a GPU every step of a loop with a traced count
goes back to the host, so the other forms compute a fixed number of runs at once: each takes the runs' tokens as
[k, s, i] and returns [k, s, o], whose rows are written to their tokens. A token that gathered its row from there, if it
has one, would make every token of the batch read twice for each class: on an H200 the activation of BERT-base's
``ffn_in`` then took twice its time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.numerics import take_rows

REFERENCE = "reference"
"""The name of each operator's candidate that is plain XLA and right on every device; over runs it loops."""
SCRATCH_BYTES = 256 << 20
"""Most bytes of dense weights that a form without loops unpacks at a time."""


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
        found = body(x_window, y_window.astype(jnp.float32), runs.slots[k], *whole)
        result = jnp.where(own[:, None], found.astype(y.dtype), y_window)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return jax.lax.fori_loop(0, runs.used, step, y)


def replace(old: Float[Array, "s o"], new: Float[Array, "s o"]) -> Float[Array, "s o"]:
    """For ``combine_runs``: the runs' products instead of what was there."""
    del old
    return new


def take_runs(x: Float[Array, "t i"], runs: Runs, size: int) -> Float[Array, "k s i"]:
    """Each run's tokens, first ones first; past its length any tokens of the batch."""
    return take_rows(x, (runs.starts + runs.offsets)[:, None] + jnp.arange(size))


def run_tokens(runs: Runs, size: int, tokens: int) -> Int[Array, "k s"]:
    """The token of each cell of the runs; of a cell without one a number past the batch, to each cell its own."""
    cell, number = jnp.arange(size), jnp.arange(len(runs.slots))[:, None]
    own = (cell < runs.lengths[:, None]) & (number < runs.used)
    return jnp.where(own, (runs.starts + runs.offsets)[:, None] + cell, tokens + number * size + cell)


def combine_runs(
    y: Float[Array, "t o"],
    how: Callable[[Array, Array], Array],
    values: Float[Array, "k s o"],
    runs: Runs,
) -> Float[Array, "t o"]:
    """``y`` with ``how(y, values)``, ``operator.add`` or ``replace``, at the runs' tokens; others keep their bits, and
    are not touched.

    Runs do not overlap, so each token is written once: no addition is atomic, and equal inputs give equal bits.
    """
    assert how in (operator.add, replace)
    rows = y.at[run_tokens(runs, values.shape[1], len(y)).reshape(-1)]
    write = rows.set if how is replace else rows.add
    return write(values.reshape(-1, y.shape[1]).astype(y.dtype), mode="drop", unique_indices=True)


def in_chunks(
    product: Callable[[Float[Array, "c s i"], Int[Array, " c"]], Float[Array, "c s o"]],
    x: Float[Array, "k s i"],
    slots: Int[Array, " k"],
    bytes_each: int,
) -> Float[Array, "k s o"]:
    """``product(x, slots)`` of a few runs at a time: it takes ``bytes_each`` of scratch memory for a run.

    Chunks, and the products of all layers, are computed one after the other: what is unpacked for each does not depend
    on the tokens, and XLA would unpack for all of them at once, 300 MB a layer for 16 masks of BERT-base's weights.
    """
    most = max(1, SCRATCH_BYTES // bytes_each)
    size = -(-len(slots) // -(-len(slots) // most))  # as even as can be
    done: list[Array] = []
    for first in range(0, len(slots), size):
        chunk = (x[first : first + size], slots[first : first + size], *done[-1:])
        rows, own, *done[-1:] = jax.lax.optimization_barrier(chunk)
        done.append(product(rows, own))
    return done[0] if len(done) == 1 else jnp.concatenate(done)
