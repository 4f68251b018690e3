"""Kernels that all layers of a program share."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.low_rank.mosaic import low_rank_mosaic
from pallas_kernels.masked_matmul.mosaic import masked_matmul_mosaic, sign_matmul_mosaic
from pallas_kernels.windows import Runs

LAYERS = 3
HASH = re.compile(r'kernel_hash = "(.*?)", module = ', re.DOTALL)


@pytest.mark.parametrize("layers", [[0], range(LAYERS)])
def test_a_program_has_a_kernel_of_each_shape_and_not_of_each_layer(layers: Sequence[int]) -> None:
    """Every one is compiled when a program is made, and again when it is loaded."""
    places = jnp.zeros(2, jnp.int32)
    runs = Runs(jnp.int32(1), places, places, places, places)

    def summed(
        x: jax.Array, w: jax.Array, bits: jax.Array, scale: jax.Array, down: jax.Array, up: jax.Array
    ) -> jax.Array:
        total = jnp.zeros(())
        for layer in layers:
            masked = masked_matmul_mosaic(x, w, bits, runs, 128, layer)
            signs = sign_matmul_mosaic(x, bits, scale, runs, 128, layer)
            low = low_rank_mosaic(x.reshape(2, 128, 384), down, up, places, layer)
            total = total + masked.sum() + signs.sum() + low.sum()
        return total

    operands = (
        jnp.zeros((256, 384), jnp.bfloat16),
        jnp.zeros((384, 256), jnp.bfloat16),
        jnp.zeros((4, LAYERS, 384, 32), jnp.uint8),
        jnp.zeros((4, LAYERS, 1)),
        jnp.zeros((4, LAYERS, 384, 16), jnp.uint16),
        jnp.zeros((4, LAYERS, 16, 384), jnp.uint16),
    )
    text = jax.jit(summed).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert len(set(HASH.findall(text))) == 3
