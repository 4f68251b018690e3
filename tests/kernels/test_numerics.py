"""The product that linear sites share, and its derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import linear
from pallas_kernels.numerics import dot


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("shape", [(7, 12), (2, 5, 12)])
def test_a_products_derivative_is_that_of_the_same_numbers_in_f32(
    dtype: str, tolerance: float, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=shape), dtype), jnp.asarray(rng.normal(size=(12, 9)), dtype)
    slope = jnp.asarray(rng.normal(size=(*shape[:-1], 9)), jnp.float32)

    def exact(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("...i,io->...o", x, w, precision="highest")

    y, back = jax.vjp(dot, x, w)
    expected, exact_back = jax.vjp(exact, x.astype(jnp.float32), w.astype(jnp.float32))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=1e-5)
    for found, truth in zip(back(slope), exact_back(slope), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), truth, atol=tolerance * float(jnp.abs(truth).max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_narrow_product_is_rounded_once(dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, w = jnp.asarray(rng.normal(size=(64, 512)), dtype), jnp.asarray(rng.normal(size=(512, 32)), dtype)
    wide, found = linear(x, w), linear(x, w, "narrow")
    assert (wide.dtype, found.dtype) == (jnp.float32, jnp.dtype(dtype))
    steps = float(jnp.finfo(dtype).eps) * jnp.maximum(jnp.abs(wide), 1e-2)
    assert (jnp.abs(found.astype(jnp.float32) - wide) <= steps).all()


def test_many_inputs_share_their_weights() -> None:
    rng = np.random.default_rng(1)
    x, w = jnp.asarray(rng.normal(size=(3, 4, 8)), jnp.bfloat16), jnp.asarray(rng.normal(size=(8, 6)), jnp.bfloat16)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.square(dot(x, w)).sum()

    each = jnp.stack([jax.grad(loss)(own) for own in x])
    np.testing.assert_array_equal(jax.vmap(jax.grad(loss))(x), each)


def test_full_precision_has_a_forward_derivative() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    _, along = jax.jvp(lambda x: dot(x, w), (x,), (2 * x,))
    np.testing.assert_array_equal(along, jnp.full((2, 4), 6.0))
