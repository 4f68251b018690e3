"""Operators at ragged sizes, on fresh numbers, with NaN wherever they have no business to read."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from on_hopper import INTERPRET, races

from pallas_kernels.low_rank import low_rank
from pallas_kernels.low_rank.mosaic import low_rank_mosaic
from pallas_kernels.low_rank.mosaic import takes as takes_low_rank
from pallas_kernels.masked_matmul import masked_matmul, pack_planes, sign_matmul
from pallas_kernels.masked_matmul.mosaic import (
    SHARED_BYTES,
    Tiles,
    _most_stages,
    masked_matmul_mosaic,
    sign_matmul_mosaic,
    takes,
)
from pallas_kernels.packed_attention import AttentionGroup, Prefix, packed_attention
from pallas_kernels.packed_attention.cudnn import packed_attention_cudnn
from pallas_kernels.sparse_matmul import block_sparse_matmul, pack_columns, sparse_matmul, tiles_of
from pallas_kernels.sparse_matmul.mosaic import block_sparse_matmul_mosaic, sparse_matmul_mosaic
from pallas_kernels.sparse_matmul.mosaic import takes as takes_sparse
from pallas_kernels.windows import Runs, combine_runs, replace

ROWS = (0, 1, 31, 33, 4097)
TASKS = (1, 1000)
RANKS = (4, 8, 24, 96, 128)
"""One for each number of rows."""
INPUTS, OUTPUTS, LAYERS, LAYER = 16, 24, 2, 1
Operator = Callable[[jax.Array, jax.Array, Runs, int], jax.Array]


class Matmuls(NamedTuple):
    """What computes products, and their sizes: inputs and outputs, dtype, most tokens of a task and of a run,
    densities."""

    masked: Callable[..., jax.Array] = masked_matmul
    signed: Callable[..., jax.Array] = sign_matmul
    sparse: Callable[..., jax.Array] = sparse_matmul
    blocks: Callable[..., jax.Array] = block_sparse_matmul
    inputs: int = INPUTS
    outputs: int = OUTPUTS
    dtype: str = "float32"
    longest: int = 90
    window: int = 32
    densities: tuple[float, ...] = (0.0, 0.02, 0.3, 1.0)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        return values.astype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)


REFERENCE = Matmuls()
WITHOUT_LOOPS = Matmuls(
    functools.partial(masked_matmul, candidate="batched"),
    functools.partial(sign_matmul, candidate="batched"),
    functools.partial(sparse_matmul, candidate="dense"),
    functools.partial(block_sparse_matmul, candidate="dense"),
)


def combined(how: Callable[..., jax.Array], kernel: Callable[..., jax.Array], **settings: Any) -> Any:
    """A kernel, which returns the runs' products, as an operator, which returns all outputs."""

    def operator(x: jax.Array, y: jax.Array, *operands: Any) -> jax.Array:
        given = {name: y.shape[1] if name == "outputs" else value for name, value in settings.items()}
        return combine_runs(y, how, kernel(x, *operands, **given, interpret=INTERPRET), operands[-3])

    return operator


MOSAIC = Matmuls(
    combined(replace, masked_matmul_mosaic, tiles=Tiles(tokens=16)),
    combined(operator.add, sign_matmul_mosaic, tiles=Tiles(tokens=16)),
    inputs=128,
    outputs=256,
    dtype="bfloat16",
    longest=60,
    window=40,
)
SPARSE_MOSAIC = Matmuls(
    sparse=combined(operator.add, sparse_matmul_mosaic, outputs=None),
    blocks=combined(operator.add, block_sparse_matmul_mosaic, outputs=None),
    longest=200,
    window=160,
    densities=(0.0, 0.02, 0.1),
)
BY_REFERENCE = [
    pytest.param(REFERENCE, rows, tasks, id=f"reference-{rows}-{tasks}") for rows in ROWS for tasks in TASKS
]


def by_mosaic(matmuls: Matmuls, *sizes: tuple[int, int]) -> list[Any]:
    """Few rows and tasks: the interpreter's time grows with them."""
    return [pytest.param(matmuls, rows, tasks, id=f"mosaic-{rows}-{tasks}") for rows, tasks in sizes]


BY_OTHERS = [
    pytest.param(WITHOUT_LOOPS, rows, tasks, id=f"without loops-{rows}-{tasks}")
    for rows, tasks in ((0, 1), (1, 1000), (33, 1), (4097, 1000))
]
MATMULS = [*BY_REFERENCE, *BY_OTHERS, *by_mosaic(MOSAIC, (20, 1))]
SPARSE_MATMULS = [*BY_REFERENCE, *BY_OTHERS, *by_mosaic(SPARSE_MOSAIC, (0, 1), (300, 1))]


def fresh() -> np.random.Generator:
    """Other numbers at every run; a failure shows their seed."""
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    logging.getLogger(__name__).warning("seed %d", seed)
    return np.random.default_rng(seed)


def spans(r: np.random.Generator, rows: int, tasks: int, longest: int) -> list[tuple[int, int, int]]:
    """(slot, first token, past the last) of neighbouring runs, with tokens of no run between some of them."""
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < rows:
        length = min(rows - at, int(r.integers(1, 1 + max(1, min(longest, 2 * rows // tasks)))))
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


def no_columns(tasks: int, most: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists of columns, and where their tiles end, of slots without entries."""
    return np.zeros((tasks + 1, LAYERS, most), np.uint8), np.zeros((tasks + 1, LAYERS, tiles_of(outputs)), np.int32)


def check_runs(
    make: Callable[[np.random.Generator, np.ndarray], tuple[Operator, Callable[[int], np.ndarray]]],
    rows: int,
    tasks: int,
    *,
    replaces: bool,
    sizes: Matmuls = REFERENCE,
) -> None:
    """``make`` gives an operator and the dense weights of each slot that is used; of others its bank holds NaN."""
    r = fresh()
    tokens, own = max(rows, 1) + 7, spans(r, rows, tasks, sizes.longest)
    mine = np.zeros(tokens, bool)
    for _, first, end in own:
        mine[first:end] = True
    x = sizes.rounded(r.normal(size=(tokens, sizes.inputs)))
    x[~mine] = np.nan
    y = r.normal(size=(tokens, sizes.outputs)).astype(np.float32)
    operator, dense = make(r, np.unique([slot for slot, _, _ in own]).astype(int))
    size = min(sizes.window, tokens)
    found = np.asarray(
        jax.jit(operator, static_argnums=3)(jnp.asarray(x), jnp.asarray(y), runs_of(own, tokens, size), size)
    )
    expected = y.astype(np.float64)
    for slot, first, end in own:
        product = x[first:end].astype(np.float64) @ dense(slot)
        expected[first:end] = product if replaces else expected[first:end] + product
    np.testing.assert_allclose(found[mine], expected[mine], atol=1e-4)
    assert found[~mine].tobytes() == y[~mine].tobytes()


def half_the_bits(r: np.random.Generator, tasks: int, sizes: Matmuls) -> np.ndarray:
    return r.random((tasks + 1, LAYERS, sizes.inputs, sizes.outputs), np.float32) < 0.5


@pytest.mark.parametrize(("matmuls", "rows", "tasks"), MATMULS)
def test_masked_matmul(matmuls: Matmuls, rows: int, tasks: int) -> None:
    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        del used
        w = matmuls.rounded(r.normal(size=(matmuls.inputs, matmuls.outputs)))
        masks = half_the_bits(r, tasks, matmuls)
        bits = jnp.asarray(pack_planes(masks))
        return (
            lambda x, y, runs, size: matmuls.masked(x, y, jnp.asarray(w), bits, runs, size, LAYER),
            lambda slot: w.astype(np.float64) * masks[slot, LAYER],
        )

    check_runs(make, rows, tasks, replaces=True, sizes=matmuls)
    assert matmuls in (REFERENCE, WITHOUT_LOOPS) or not races()


@pytest.mark.parametrize(("matmuls", "rows", "tasks"), MATMULS)
def test_sign_matmul(matmuls: Matmuls, rows: int, tasks: int) -> None:
    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        plus = half_the_bits(r, tasks, matmuls)
        scale = np.full((tasks + 1, LAYERS, 1), np.nan, np.float32)
        scale[used, LAYER] = r.random((len(used), 1))
        bits = jnp.asarray(pack_planes(plus))
        return (
            lambda x, y, runs, size: matmuls.signed(x, y, bits, jnp.asarray(scale), runs, size, LAYER),
            lambda slot: np.where(plus[slot, LAYER], 1.0, -1.0) * scale[slot, LAYER],
        )

    check_runs(make, rows, tasks, replaces=False, sizes=matmuls)
    assert matmuls in (REFERENCE, WITHOUT_LOOPS) or not races()


@pytest.mark.parametrize(("i", "o", "rank"), [(384, 1536, 16), (768, 768, 48), (3072, 768, 64), (1024, 4096, 128)])
def test_kernels_compile_for_hopper_at_the_sizes_of_backbones(i: int, o: int, rank: int) -> None:
    """As far as it goes without a GPU: tiles, layouts and copies are accepted."""
    x, y, w = jnp.zeros((256, i), jnp.bfloat16), jnp.zeros((256, o)), jnp.zeros((i, o), jnp.bfloat16)
    bits, scale = jnp.zeros((4, LAYERS, i, o // 8), jnp.uint8), jnp.zeros((4, LAYERS, 1))
    runs = runs_of([(1, 0, 40), (3, 41, 201)], 256, 128)
    rows, cols = (jnp.zeros((4, LAYERS, 50), kind) for kind in (jnp.uint16, jnp.uint8))
    values, blocks = (jnp.zeros((4, LAYERS, 50, *shape), jnp.uint16) for shape in ((), (16, 16)))

    def ends(columns: int) -> jax.Array:
        return jnp.zeros((4, LAYERS, tiles_of(columns)), jnp.int32)

    assert takes(x, bits) and not takes(x, bits[..., :48])
    assert takes_sparse(y) and takes_sparse(y, 16) and not takes_sparse(y, 24)
    kernels: list[tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]] = [
        (masked_matmul_mosaic, (x, w, bits)),
        (sign_matmul_mosaic, (x, bits, scale)),
        (functools.partial(sparse_matmul_mosaic, outputs=o), (x, rows, cols, ends(o), values)),
        (functools.partial(block_sparse_matmul_mosaic, outputs=o), (x, rows, cols, ends(o // 16), blocks)),
    ]
    for kernel, operands in kernels:
        check_compiles(functools.partial(kernel, size=128, layer=LAYER), *operands, runs)
    slots, groups = jnp.zeros(2, jnp.int32), x.reshape(2, 128, i)
    down, up = jnp.zeros((4, LAYERS, i, rank), jnp.uint16), jnp.zeros((4, LAYERS, rank, o), jnp.uint16)
    assert takes_low_rank(groups, down, up) and not takes_low_rank(groups, down[:, :, :40], up)
    check_compiles(functools.partial(low_rank_mosaic, layer=LAYER, activation="gelu"), groups, down, up, slots)
    check_compiles(functools.partial(low_rank_mosaic, layer=LAYER), groups, down[..., :8], up[:, :, :8], slots)


def check_compiles(kernel: Callable[..., jax.Array], *operands: Any) -> None:
    assert "mosaic_gpu" in jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("matmuls", "rows", "tasks"), SPARSE_MATMULS)
def test_sparse_matmul(matmuls: Matmuls, rows: int, tasks: int) -> None:
    """From no non-zero to every one, some columns full; the rest of a slot's list is padding."""

    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        most = INPUTS * OUTPUTS
        at_row = np.zeros((tasks + 1, LAYERS, most), np.uint16)
        at_col, ends = no_columns(tasks, most, OUTPUTS)
        values = np.full((tasks + 1, LAYERS, most), np.nan, np.float32)
        dense: dict[int, np.ndarray] = {}
        for slot in used:
            chosen = r.random((INPUTS, OUTPUTS)) < r.choice(matmuls.densities)
            chosen[:, int(r.integers(OUTPUTS))] |= r.random() < 0.3
            cols, held = np.nonzero(chosen.T)
            own = r.normal(size=len(held)).astype(np.float32)
            at_row[slot, LAYER, : len(held)] = held
            at_col[slot, LAYER, : len(held)], ends[slot, LAYER] = pack_columns(cols, OUTPUTS)
            values[slot, LAYER] = 0
            values[slot, LAYER, : len(held)] = own
            dense[int(slot)] = np.zeros((INPUTS, OUTPUTS))
            dense[int(slot)][held, cols] = own
        arrays = [jnp.asarray(part) for part in (at_row, at_col, ends, values)]
        return lambda x, y, runs, size: matmuls.sparse(x, y, *arrays, runs, size, LAYER), dense.__getitem__

    check_runs(make, rows, tasks, replaces=False, sizes=matmuls)
    assert matmuls in (REFERENCE, WITHOUT_LOOPS) or not races()


@pytest.mark.parametrize(("matmuls", "rows", "tasks"), SPARSE_MATMULS)
def test_block_sparse_matmul(matmuls: Matmuls, rows: int, tasks: int) -> None:
    """From no block to every one; the rest of a slot's list is padding, its blocks NaN."""
    side = 8

    def make(r: np.random.Generator, used: np.ndarray) -> tuple[Operator, Callable[[int], np.ndarray]]:
        high, wide = INPUTS // side, OUTPUTS // side
        at_row = np.zeros((tasks + 1, LAYERS, high * wide), np.uint16)
        at_col, ends = no_columns(tasks, high * wide, wide)
        blocks = np.full((tasks + 1, LAYERS, high * wide, side, side), np.nan, np.float32)
        dense: dict[int, np.ndarray] = {}
        for slot in used:
            cols, held = np.nonzero(r.random((wide, high)) < r.choice([0.0, 0.3, 1.0]))
            at_row[slot, LAYER, : len(held)] = held
            at_col[slot, LAYER, : len(held)], ends[slot, LAYER] = pack_columns(cols, wide)
            blocks[slot, LAYER, : len(held)] = r.normal(size=(len(held), side, side))
            dense[int(slot)] = np.zeros((INPUTS, OUTPUTS))
            for row, col, block in zip(held, cols, blocks[slot, LAYER], strict=False):
                dense[int(slot)][row * side : (row + 1) * side, col * side : (col + 1) * side] = block
        arrays = [jnp.asarray(part) for part in (at_row, at_col, ends, blocks)]
        return lambda x, y, runs, size: matmuls.blocks(x, y, *arrays, runs, size, LAYER), dense.__getitem__

    check_runs(make, rows, tasks, replaces=False, sizes=matmuls)
    assert matmuls in (REFERENCE, WITHOUT_LOOPS) or not races()


RANKED = [
    *(
        pytest.param(low_rank, rows, rank, tasks, dtype, id=f"reference-{rows}-{rank}-{tasks}-{dtype}")
        for rows, rank in (*zip(ROWS, RANKS, strict=True), (33, 4), (31, 128))
        for tasks in TASKS
        for dtype in ("float32", "bfloat16")
    ),
    *(
        pytest.param(
            functools.partial(low_rank_mosaic, interpret=INTERPRET),
            rows,
            rank,
            tasks,
            "bfloat16",
            id=f"mosaic-{rank}",
        )
        for rows, rank, tasks in ((1, 48, 1000), (3, 16, 1), (2, 8, 3))
    ),
]


@pytest.mark.parametrize(("operator", "rows", "rank", "tasks", "dtype"), RANKED)
def test_low_rank(operator: Callable[..., jax.Array], rows: int, rank: int, tasks: int, dtype: str) -> None:
    r, inputs, outputs = fresh(), *((INPUTS, OUTPUTS) if operator is low_rank else (128, 96))
    slots = r.integers(0, tasks + 1, rows).astype(np.int32)
    used = np.unique(slots)
    x = r.normal(size=(rows, 3, inputs)).astype(np.float32)
    banks, exact = [], []
    for shape in ((inputs, rank), (rank, outputs)):
        values = np.full((tasks + 1, LAYERS, *shape), np.nan, np.float32)
        values[used, LAYER] = r.normal(size=(len(used), *shape)) / shape[0] ** 0.5
        kept = values.astype(ml_dtypes.bfloat16)
        banks.append(jnp.asarray(kept.view(np.uint16) if dtype == "bfloat16" else values))
        exact.append((kept if dtype == "bfloat16" else values).astype(np.float64)[:, LAYER])
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    found = np.asarray(jax.jit(functools.partial(operator, layer=LAYER))(x.astype(kind), *banks, jnp.asarray(slots)))
    hidden = np.einsum("gsi,gir->gsr", x.astype(kind).astype(np.float64), exact[0][slots])
    expected = np.einsum("gsr,gro->gso", hidden, exact[1][slots])
    assert found.shape == (rows, 3, outputs)
    np.testing.assert_allclose(found, expected, atol=1e-4 if dtype == "float32" else 0.1)
    assert operator is low_rank or not races()


ATTENTIONS: Mapping[str, Callable[..., Any]] = {
    "reference": packed_attention,
    "cudnn": functools.partial(packed_attention_cudnn, implementation="xla"),
}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("extra", [(), (3,), (2, 5)], ids=["alone", "a prefix", "two prefixes"])
@pytest.mark.parametrize("rows", [0, 1, 31, 33])
def test_packed_attention(rows: int, extra: tuple[int, ...], attention: str) -> None:
    """Rows of 1 to 16 tokens in a rectangle, some with fewer prefix entries than there is room for, or none."""
    r, heads, size, length = fresh(), 2, 4, 16
    places = max(rows, 1)
    lengths = np.concatenate([r.integers(1, length + 1, rows), np.zeros(places - rows, int)]).astype(np.int32)
    q, k, v = (r.normal(size=(places * length, heads * size)).astype(np.float32) for _ in range(3))
    prefixes, counts = [], []
    for most in extra:
        count = r.integers(0, most + 1, places).astype(np.int32)
        parts = [r.normal(size=(places, most, heads * size)).astype(np.float32) for _ in range(2)]
        key, value = (jnp.asarray(part) for part in parts)
        prefixes.append(Prefix(key, value, jnp.asarray(count)))
        counts.append((parts, count))
    group = AttentionGroup(None, jnp.asarray(lengths))
    found = np.asarray(
        ATTENTIONS[attention](jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), (group,), None, heads, prefixes)
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


@pytest.mark.parametrize(("tokens", "stages"), [(8, 3), (104, 3), (112, 2), (120, 2), (128, 2)])
def test_a_block_of_masks_fits_shared_memory(tokens: int, stages: int) -> None:
    """Selected weights, results, and each step's tokens, bits and shared weights, in bytes."""
    assert min(Tiles().stages, _most_stages(tokens)) == stages
    held = 32768 + 512 * tokens
    assert held + stages * (128 * tokens + 2048 + 32768) <= SHARED_BYTES
