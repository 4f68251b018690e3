"""Vectors in 8 bits: what they lose, and that programs read them as they were written."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jpets.config import SCALED
from jpets.errors import InvalidInput
from jpets.model.merging import numbers
from jpets.plot.values import BIAS, check_format, row_bytes, stored

SHAPE = (3, 2, 2 * SCALED)


def read(values: np.ndarray) -> np.ndarray:
    kept = stored(values, "float8")
    assert kept.dtype == np.uint8 and kept[0].nbytes == row_bytes("float8", *values.shape[1:])
    return np.asarray(numbers(jnp.asarray(kept.reshape(-1, kept.shape[-1])), "float8")).reshape(values.shape)


@given(arrays.arrays(np.float32, SHAPE, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_a_number_is_off_by_a_sixteenth_or_little_of_its_block(values: np.ndarray) -> None:
    """Three bits of a fraction; below the smallest exponent a step is 2^-17 of the largest number, or so. The largest
    numbers of a block, from 448 of 512 parts of its power of two on, are cut."""
    blocks = values.reshape(-1, SCALED)
    largest = np.abs(blocks).max(1, keepdims=True)
    lost = np.abs(read(values).reshape(-1, SCALED) - blocks)
    _, exponents = np.frexp(largest)  # a block's power of two is its largest number's, times 2
    cut = np.abs(blocks) > np.ldexp(448 / 512, exponents)
    allowed = np.maximum(np.abs(blocks) / np.where(cut, 8, 16), largest * 2.0**-16)
    assert (lost <= allowed * (1 + 1e-6) + 1.2e-38).all()


@given(st.integers(-100, 100))
def test_what_eight_bits_can_say_comes_back_as_it_is(exponent: int) -> None:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    some = codes[np.isfinite(codes)][: 7 * SCALED].reshape(1, 1, -1)
    some[..., ::SCALED] = 256  # each block's power of two
    values = np.ldexp(some, exponent)
    np.testing.assert_array_equal(read(values), values)


def test_zero_and_the_smallest_numbers_are_finite() -> None:
    values = np.zeros((1, 1, 2 * SCALED), np.float32)
    values[..., SCALED:] = 1e-38
    found = read(values)
    assert (
        (found[..., :SCALED] == 0).all()
        and np.isfinite(found).all()
        and (stored(values, "float8")[..., -1] < BIAS).all()
    )


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(InvalidInput, match="multiple of 32 numbers, found 40"):
        check_format("float8", 40)
    check_format("bfloat16", 40)
    for given_as in ("bfloat16", "float8"):
        with pytest.raises(InvalidInput, match="not finite"):
            stored(np.full(SHAPE, np.inf, np.float32), given_as)
