"""Operators at ragged sizes, on fresh numbers, with NaN wherever they have no business to read."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.low_rank import low_rank
from pallas_kernels.masked_matmul import masked_matmul, pack_planes, sign_matmul
from pallas_kernels.packed_attention import AttentionGroup, Prefix, packed_attention
from pallas_kernels.sparse_matmul import block_sparse_matmul, sparse_matmul
from pallas_kernels.windows import Runs

ROWS = (0, 1, 31, 33, 4097)
TASKS = (1, 1000)
RANKS = (4, 8, 24, 96, 128)
"""One for each number of rows."""
INPUTS, OUTPUTS, LAYERS, LAYER = 16, 24, 2, 1
Operator = Callable[[jax.Array, jax.Array, Runs, int], jax.Array]


def fresh() -> np.random.Generator:
    """Other numbers at every run; a failure shows their seed."""
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    logging.getLogger(__name__).warning("seed %d", seed)
    return np.random.default_rng(seed)


def spans(r: np.random.Generator, rows: int, tasks: int) -> list[tuple[int, int, int]]:
    """(slot, first token, past the last) of neighbouring runs, with tokens of nobody between some of them."""
    found, at = [], 0
    while at < rows:
        length = int(min(rows - at, r.integers(1, 1 + max(1, min(90, 2 * rows // tasks)))))
        if r.random() < 0.9 or not found:
            found.append((int(r.integers(1, tasks + 1)), at, at + length))
        at += length
    return found


def runs_of(own: Sequence[tuple[int, int, int]], tokens: int, size: int) -> Runs:
    entries = [
        (slot, min(begin, tokens - size), begin - min(begin, tokens - size), min(size, end - begin))
        for slot, first, end in own
        for begin in range(first, end, size)
    ]
    columns = np.array([*entries, (1, 0, 0, 0)], np.int32).T
    return Runs(jnp.int32(len(entries)), *(jnp.asarray(column) for column in columns))


def check_runs(
    make: Callable[[np.random.Generator, np.ndarray], tuple[Operator, Callable[[int], np.ndarray]]],
    rows: int,
    tasks: int,
    *,
    replaces: bool,
) -> None:
    """``make`` gives an operator and the dense weights of each slot that is used; of others its bank holds NaN."""
    r = fresh()
    tokens, own = max(rows, 1) + 7, spans(r, rows, tasks)
    mine = np.zeros(tokens, bool)
    for _, first, end in own:
        mine[first:end] = True
    x = r.normal(size=(tokens, INPUTS)).astype(np.float32)
    x[~mine] = np.nan
    y = r.normal(size=(tokens, OUTPUTS)).astype(np.float32)
    operator, dense = make(r, np.unique([slot for slot, _, _ in own]).astype(int))
    size = min(32, tokens)
    found = np.asarray(
        jax.jit(operator, static_argnums=3)(jnp.asarray(x), jnp.asarray(y), runs_of(own, tokens, size), size)
    )
    expected = y.astype(np.float64)
    for slot, first, end in own:
        product = x[first:end].astype(np.float64) @ dense(slot)
        expected[first:end] = product if replaces else expected[first:end] + product
    np.testing.assert_allclose(found[mine], expected[mine], atol=1e-4)
    assert found[~mine].tobytes() == y[~mine].tobytes()


def half_the_bits(r: np.random.Generator, tasks: int) -> np.ndarray:
    return r.random((tasks + 1, LAYERS, INPUTS, OUTPUTS)) < 0.5


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("rows", ROWS)
def test_masked_matmul(rows: int, tasks: int) -> None:
    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        del used
        w, masks = r.normal(size=(INPUTS, OUTPUTS)).astype(np.float32), half_the_bits(r, tasks)
        bits = jnp.asarray(pack_planes(masks))
        return (
            lambda x, y, runs, size: masked_matmul(x, y, jnp.asarray(w), bits, runs, size, LAYER),
            lambda slot: w.astype(np.float64) * masks[slot, LAYER],
        )

    check_runs(make, rows, tasks, replaces=True)


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("rows", ROWS)
def test_sign_matmul(rows: int, tasks: int) -> None:
    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        plus = half_the_bits(r, tasks)
        scale = np.full((tasks + 1, LAYERS, 1), np.nan, np.float32)
        scale[used, LAYER] = r.random((len(used), 1))
        bits = jnp.asarray(pack_planes(plus))
        return (
            lambda x, y, runs, size: sign_matmul(x, y, bits, jnp.asarray(scale), runs, size, LAYER),
            lambda slot: np.where(plus[slot, LAYER], 1.0, -1.0) * scale[slot, LAYER],
        )

    check_runs(make, rows, tasks, replaces=False)


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("rows", ROWS)
def test_sparse_matmul(rows: int, tasks: int) -> None:
    """From no non-zero to every one, some columns full; the rest of a slot's list is padding."""

    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        most = INPUTS * OUTPUTS
        at_row = np.zeros((tasks + 1, LAYERS, most), np.uint16)
        at_col = np.full((tasks + 1, LAYERS, most), 65535, np.uint16)
        values = np.full((tasks + 1, LAYERS, most), np.nan, np.float32)
        dense: dict[int, np.ndarray] = {}
        for slot in used:
            chosen = r.random((INPUTS, OUTPUTS)) < r.choice([0.0, 0.02, 0.3, 1.0])
            chosen[:, int(r.integers(OUTPUTS))] |= r.random() < 0.3
            cols, held = np.nonzero(chosen.T)
            own = r.normal(size=len(held)).astype(np.float32)
            at_row[slot, LAYER, : len(held)], at_col[slot, LAYER, : len(held)] = held, cols
            values[slot, LAYER] = 0
            values[slot, LAYER, : len(held)] = own
            dense[int(slot)] = np.zeros((INPUTS, OUTPUTS))
            dense[int(slot)][held, cols] = own
        arrays = [jnp.asarray(part) for part in (at_row, at_col, values)]
        return lambda x, y, runs, size: sparse_matmul(x, y, *arrays, runs, size, LAYER), dense.__getitem__

    check_runs(make, rows, tasks, replaces=False)


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("rows", ROWS)
def test_block_sparse_matmul(rows: int, tasks: int) -> None:
    """From no block to every one; the rest of a slot's list is padding, its blocks NaN."""
    side = 8

    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        high, wide = INPUTS // side, OUTPUTS // side
        at_row = np.zeros((tasks + 1, LAYERS, high * wide), np.uint16)
        at_col = np.full((tasks + 1, LAYERS, high * wide), 65535, np.uint16)
        blocks = np.full((tasks + 1, LAYERS, high * wide, side, side), np.nan, np.float32)
        dense: dict[int, np.ndarray] = {}
        for slot in used:
            cols, held = np.nonzero(r.random((wide, high)) < r.choice([0.0, 0.3, 1.0]))
            at_row[slot, LAYER, : len(held)], at_col[slot, LAYER, : len(held)] = held, cols
            blocks[slot, LAYER, : len(held)] = r.normal(size=(len(held), side, side))
            dense[int(slot)] = np.zeros((INPUTS, OUTPUTS))
            for row, col, block in zip(held, cols, blocks[slot, LAYER], strict=False):
                dense[int(slot)][row * side : (row + 1) * side, col * side : (col + 1) * side] = block
        arrays = [jnp.asarray(part) for part in (at_row, at_col, blocks)]
        return lambda x, y, runs, size: block_sparse_matmul(x, y, *arrays, runs, size, LAYER), dense.__getitem__

    check_runs(make, rows, tasks, replaces=False)


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize(("rows", "rank"), [*zip(ROWS, RANKS, strict=True), (33, 4), (31, 128)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_rank(rows: int, rank: int, tasks: int, dtype: str) -> None:
    r = fresh()
    slots = r.integers(0, tasks + 1, rows).astype(np.int32)
    used = np.unique(slots)
    x = r.normal(size=(rows, 3, INPUTS)).astype(np.float32)
    banks, exact = [], []
    for shape in ((INPUTS, rank), (rank, OUTPUTS)):
        values = np.full((tasks + 1, LAYERS, *shape), np.nan, np.float32)
        values[used, LAYER] = r.normal(size=(len(used), *shape)) / shape[0] ** 0.5
        kept = values.astype(ml_dtypes.bfloat16)
        banks.append(jnp.asarray(kept.view(np.uint16) if dtype == "bfloat16" else values))
        exact.append((kept if dtype == "bfloat16" else values).astype(np.float64)[:, LAYER])
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    found = np.asarray(jax.jit(functools.partial(low_rank, layer=LAYER))(x.astype(kind), *banks, jnp.asarray(slots)))
    hidden = np.einsum("gsi,gir->gsr", x.astype(kind).astype(np.float64), exact[0][slots])
    expected = np.einsum("gsr,gro->gso", hidden, exact[1][slots])
    assert found.shape == (rows, 3, OUTPUTS)
    np.testing.assert_allclose(found, expected, atol=1e-4 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("extra", [(), (3,), (2, 5)], ids=["alone", "a prefix", "two prefixes"])
@pytest.mark.parametrize("rows", [0, 1, 31, 33])
def test_packed_attention(rows: int, extra: tuple[int, ...]) -> None:
    """Rows of 1 to 16 tokens in a rectangle, some with fewer prefix entries than there is room for, or none."""
    r, heads, size, length = fresh(), 2, 4, 16
    places = max(rows, 1)
    lengths = np.concatenate([r.integers(1, length + 1, rows), np.zeros(places - rows, int)]).astype(np.int32)
    q, k, v = (r.normal(size=(places * length, heads * size)).astype(np.float32) for _ in range(3))
    prefixes, counts = [], []
    for most in extra:
        count = r.integers(0, most + 1, places).astype(np.int32)
        parts = [r.normal(size=(places, most, heads * size)).astype(np.float32) for _ in range(2)]
        prefixes.append(Prefix(*(jnp.asarray(part) for part in parts), jnp.asarray(count)))
        counts.append((parts, count))
    group = AttentionGroup(None, jnp.asarray(lengths))
    found = np.asarray(
        packed_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), (group,), None, heads, prefixes)
    )
    for row in range(rows):
        own = slice(row * length, row * length + lengths[row])
        keys = np.concatenate([*(parts[0][row, : count[row]] for parts, count in counts), k[own]]).astype(np.float64)
        values = np.concatenate([*(parts[1][row, : count[row]] for parts, count in counts), v[own]]).astype(np.float64)
        a, b, c = (part.reshape(len(part), heads, size) for part in (q[own].astype(np.float64), keys, values))
        scores = np.einsum("qhs,khs->hqk", a, b) / size**0.5
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        expected = np.einsum("hqk,khs->qhs", probs, c).reshape(-1, heads * size)
        np.testing.assert_allclose(found[own], expected, atol=1e-5)
