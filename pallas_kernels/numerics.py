"""Number formats that the operators share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num, UInt

AnyArray = Array | np.ndarray
"""On a device, traced, or in host memory."""
LayerIndex = int | Int[Array, ""]
"""The place of a layer in a bank; kernels need a number, the other operators take a traced one too."""


def dot(x: Float[Array, "*b i"], w: Float[Array, "i o"]) -> Float[Array, "*b o"]:
    """x W in the precision of W, accumulated in f32. f32 weights ask for full f32 products (no TF32).

    Products of 16-bit weights have 16-bit cotangents, as mixed-precision training has them (Micikevicius et al. 2018);
    they have no forward-mode derivative.
    """
    x = x.astype(w.dtype)
    axes = ((x.ndim - 1,), (0,))
    return _product(x, w, axes, jax.lax.Precision.HIGHEST) if w.dtype == jnp.float32 else _narrow_dot(x, w)


@jax.custom_vjp
def _narrow_dot(x: Float[Array, "*b i"], w: Float[Array, "i o"]) -> Float[Array, "*b o"]:
    return _product(x, w, ((x.ndim - 1,), (0,)))


def _narrow_dot_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _narrow_dot(x, w), (x, w)


def _narrow_dot_backward(kept: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    """Without it the product's own derivative multiplies f32 by 16-bit numbers, eight times slower on a CPU."""
    x, w = kept
    slope = slope.astype(w.dtype)
    rows = tuple(range(x.ndim - 1))
    return _product(slope, w, ((x.ndim - 1,), (1,))).astype(x.dtype), _product(x, slope, (rows, rows)).astype(w.dtype)


_narrow_dot.defvjp(_narrow_dot_forward, _narrow_dot_backward)


def _product(
    a: Array, b: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], precision: jax.lax.Precision | None = None
) -> Array:
    """The sums of products over ``axes`` of ``a`` and of ``b``, in f32."""
    return jax.lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def batched_dot(x: Float[Array, "g s i"], w: Float[Array, "g i o"]) -> Float[Array, "g s o"]:
    """One product a leading index: row g never meets the numbers of another row."""
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x.astype(w.dtype), w, (((2,), (1,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32
    )


def value_dtype(bank: Num[Array, " ..."]) -> jnp.dtype:
    """The dtype of the numbers that a bank holds: 16-bit banks are bf16 values kept as uint16 (cheap to update)."""
    return jnp.dtype(jnp.bfloat16 if bank.dtype == jnp.uint16 else bank.dtype)


def take_rows(x: Num[Array, "n ..."], at: Int[Array, "*b"]) -> Num[Array, " ..."]:
    """``x[at]``, the nearest row where an index is out of bounds: to fill in zeros there costs a pass of its own."""
    return x.at[at].get(mode="clip")


def take_slots(
    bank: Num[Array, "slots layers *shape"], slots: Int[Array, " g"], layer: LayerIndex
) -> Num[Array, " g *shape"]:
    """``bank[slots, layer]`` in the bank's value dtype.

    A selection, never a sum: no other slot's numbers, NaN or not, can enter. Slots are checked on the host.
    """
    return _values(bank.at[slots, layer].get(mode="promise_in_bounds"))


def _values(rows: Num[Array, " ..."]) -> Num[Array, " ..."]:
    """Gathered numbers of a bank in its value dtype."""
    if rows.dtype != jnp.uint16:
        return rows
    # The barrier keeps XLA from fusing the reinterpretation into the gather, which it then does number by number.
    return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(rows), jnp.bfloat16)


def take_range(
    bank: Num[Array, "slots layers n"], slots: Int[Array, " g"], first: LayerIndex, size: int
) -> Num[Array, "g s"]:
    """``bank[slots, 0, first : first + size]`` in the bank's value dtype; nothing else of the slots is read."""

    def one(slot: Array) -> Array:
        return jax.lax.dynamic_slice(bank, (slot, 0, first), (1, 1, size)).reshape(size)

    return _values(jax.vmap(one)(slots))


def take_counts(bank: UInt[Array, "slots layers 1"], slots: Int[Array, " g"], layer: LayerIndex) -> Int[Array, " g"]:
    """``bank[slots, layer]`` where a bank holds how many entries of a slot count."""
    return bank.at[slots, layer, 0].get(mode="promise_in_bounds").astype(jnp.int32)


def unit_norm(x: Float[Array, "*b d"], eps: float) -> Float[Array, "*b d"]:
    """A layer norm before its scale and bias."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps)


def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """x P(X <= x) for a standard normal X (Hendrycks & Gimpel 2016), by erf as Hugging Face's models have it.

    ``jax.nn.gelu`` goes by erfc, which is exact to more digits at the far left, where the result is all but zero, and
    takes twice the time on a CPU: 3 % of a BERT-base batch.
    """
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
}
