"""An operator with candidates that are right, wrong, slow, broken, or for other devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jpets.engine.kernels.calls import Call, Candidate, Operator, Sample
from pallas_kernels.gates import Device, Gate

GPU = Device("gpu", "Fake GPU", (8, 0))
CALL = Call("double", "8 float32", (jax.ShapeDtypeStruct((4, 8), jnp.float32),), {"times": 2.0})
NARROW = Call("double", "4 float32", (jax.ShapeDtypeStruct((4, 4), jnp.float32),), {"times": 2.0})


def double(x: jax.Array, *, times: float) -> jax.Array:
    return x * times


def slow(x: jax.Array, *, times: float) -> jax.Array:
    def step(_: object, y: jax.Array) -> jax.Array:
        return jnp.tanh(y) if y.size < 0 else jnp.sin(y)  # work that no compiler removes

    steps = 200_000 if jax.default_backend() == "cpu" else 2_000  # a launch each, and trials make many calls
    return x * times + 0.0 * jax.lax.fori_loop(0, steps, step, x)


def wrong(x: jax.Array, *, times: float) -> jax.Array:
    return x * times * 1.01


def spills(x: jax.Array, *, times: float) -> jax.Array:
    """Reads the last row, which is no row's."""
    return x * times + 0.0 * x[-1]


def overwrites(x: jax.Array, *, times: float) -> jax.Array:
    return jnp.nan_to_num(x * times)


def large(x: jax.Array, *, times: float) -> jax.Array:
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 8 bytes")


def broken(x: jax.Array, *, times: float) -> jax.Array:
    raise NotImplementedError("no such instruction")


def sample(call: Call, rng: np.random.Generator) -> Sample:
    """The last row is no row's."""
    x = rng.standard_normal(call.operands[0].shape, np.float32)
    x[-1] = np.nan
    own = np.arange(len(x)) < len(x) - 1
    return Sample((x,), call.settings, own, x)


FUTURE = Gate(frozenset({"gpu"}), capability=(9, 0))
WIDE = Gate(takes=lambda x, times: x.shape[1] % 8 == 0, sizes="rows in multiples of 8")
TABLE = {
    "double": Operator(
        {
            "reference": Candidate(double),
            "slow": Candidate(slow),
            "wrong": Candidate(wrong),
            "spills": Candidate(spills),
            "overwrites": Candidate(overwrites),
            "broken": Candidate(broken),
            "large": Candidate(large),
            "future": Candidate(double, FUTURE),
            "wide": Candidate(double, WIDE),
        },
        sample,
        lambda device: "reference",
    )
}
