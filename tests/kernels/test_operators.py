"""Each operator against a loop in f64 that spells out its meaning."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from on_hopper import INTERPRET, candidates

from pallas_kernels import windows
from pallas_kernels.low_rank import low_rank
from pallas_kernels.low_rank.mosaic import ON_CHIP, Tiles, low_rank_mosaic
from pallas_kernels.masked_matmul import apply_mask, masked_matmul, pack_planes, sign_matmul, signs
from pallas_kernels.numerics import ACTIVATIONS
from pallas_kernels.packed_attention import AttentionGroup, packed_attention
from pallas_kernels.packed_attention.cudnn import packed_attention_cudnn
from pallas_kernels.sparse_matmul import block_sparse_matmul, pack_columns, sparse_matmul
from pallas_kernels.sparse_matmul.columns import unpack_columns
from pallas_kernels.windows import Runs

SLOTS, LAYERS, LAYER = 4, 3, 1
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def stored(values: np.ndarray, dtype: str) -> tuple[jax.Array, np.ndarray]:
    """A bank's array, bf16 kept as uint16, and the numbers it holds in f64."""
    if dtype == "float32":
        return jnp.asarray(values, jnp.float32), values.astype(np.float64)
    rounded = values.astype(ml_dtypes.bfloat16)
    return jnp.asarray(rounded.view(np.uint16)), rounded.astype(np.float64)


def rounded(values: np.ndarray, dtype: str) -> tuple[jax.Array, np.ndarray]:
    exact = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    return jnp.asarray(exact), exact.astype(np.float64)


def make_runs() -> Runs:
    """Two runs of a window of six tokens out of twelve; the third entry is not used."""
    arrays = [[1, 3, 2], [0, 6, 0], [1, 0, 0], [4, 5, 6]]
    return Runs(jnp.int32(2), *(jnp.array(values, jnp.int32) for values in arrays))


RUN_TOKENS = {1: range(1, 5), 3: range(6, 11)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rank", [4, 8, 64])
def test_low_rank(dtype: str, rank: int) -> None:
    r = rng()
    x, x64 = rounded(r.normal(size=(5, 7, 24)), dtype)
    down, down64 = stored(r.normal(size=(SLOTS, LAYERS, 24, rank)), dtype)
    up, up64 = stored(r.normal(size=(SLOTS, LAYERS, rank, 16)) / rank, dtype)
    down_bias, db64 = stored(r.normal(size=(SLOTS, LAYERS, rank)), dtype)
    up_bias, ub64 = stored(r.normal(size=(SLOTS, LAYERS, 16)), dtype)
    slots = jnp.array([3, 0, 1, 1, 2], jnp.int32)
    plain = low_rank(x, down, up, slots, LAYER)
    full = low_rank(x, down, up, slots, LAYER, activation="relu", down_bias=down_bias, up_bias=up_bias)
    for g, slot in enumerate(np.asarray(slots)):
        hidden = x64[g] @ down64[slot, LAYER]
        scale = np.abs(hidden).max() * np.abs(up64).max() * rank**0.5
        np.testing.assert_allclose(plain[g], hidden @ up64[slot, LAYER], atol=TOLERANCE[dtype] * scale)
        active = np.maximum(hidden + db64[slot, LAYER], 0)
        expected = active @ up64[slot, LAYER] + ub64[slot, LAYER]
        np.testing.assert_allclose(full[g], expected, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_on_the_chip_is_the_same(activation: str) -> None:
    x = jnp.linspace(-12, 12, 100_001)[None]
    np.testing.assert_allclose(ON_CHIP[activation](x), ACTIVATIONS[activation](x), atol=1e-6)


def test_low_rank_on_the_chip_adds_biases_and_activates() -> None:
    """Groups of 75 rows: two tiles of 64, the last one's rows partly another group's."""
    r = rng()
    x, _ = rounded(r.normal(size=(2, 75, 64)), "bfloat16")
    shapes = ((64, 96), (96, 96), (96,), (96,))
    down, up, down_bias, up_bias = (stored(r.normal(size=(SLOTS, LAYERS, *each)) / 8, "bfloat16")[0] for each in shapes)
    slots = jnp.array([3, 1], jnp.int32)
    found, expected = (
        operator(x, down, up, slots, LAYER, activation="gelu", down_bias=down_bias, up_bias=up_bias)
        for operator in (
            functools.partial(low_rank_mosaic, tiles=Tiles(rows=64), interpret=INTERPRET),
            low_rank,
        )
    )
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("candidate", candidates("masked_matmul"))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_masked_matmul(dtype: str, candidate: str) -> None:
    r = rng()
    x, x64 = rounded(r.normal(size=(12, 16)), dtype)
    w, w64 = rounded(r.normal(size=(16, 24)), dtype)
    masks = r.random((SLOTS, LAYERS, 16, 24)) < 0.5
    y = r.normal(size=(12, 24)).astype(np.float32)
    bits = jnp.asarray(pack_planes(masks))
    found = np.asarray(masked_matmul(x, jnp.asarray(y), w, bits, make_runs(), 6, LAYER, candidate))
    expected = y.astype(np.float64)
    for slot, tokens in RUN_TOKENS.items():
        expected[list(tokens)] = x64[list(tokens)] @ (w64 * masks[slot, LAYER])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"])
    others = [t for t in range(12) if t not in [*RUN_TOKENS[1], *RUN_TOKENS[3]]]
    assert found[others].tobytes() == y[others].tobytes()


@pytest.mark.parametrize("candidate", candidates("sign_matmul"))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sign_matmul(dtype: str, candidate: str) -> None:
    r = rng()
    x, x64 = rounded(r.normal(size=(12, 16)), dtype)
    plus = r.random((SLOTS, LAYERS, 16, 24)) < 0.5
    scale = r.random((SLOTS, LAYERS, 1)).astype(np.float32)
    scale[2] = np.nan  # a slot that no run uses
    y = r.normal(size=(12, 24)).astype(np.float32)
    bits = jnp.asarray(pack_planes(plus))
    found = np.asarray(sign_matmul(x, jnp.asarray(y), bits, jnp.asarray(scale), make_runs(), 6, LAYER, candidate))
    expected = y.astype(np.float64)
    for slot, tokens in RUN_TOKENS.items():
        expected[list(tokens)] += scale[slot, LAYER] * (x64[list(tokens)] @ np.where(plus[slot, LAYER], 1.0, -1.0))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"])
    others = [t for t in range(12) if t not in [*RUN_TOKENS[1], *RUN_TOKENS[3]]]
    assert found[others].tobytes() == y[others].tobytes()


@pytest.mark.parametrize("most", [0, 1, 3, 7, 100])
def test_what_is_computed_in_chunks_is_the_same(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``most`` runs at a time fit the scratch memory; at least one is computed."""
    monkeypatch.setattr(windows, "SCRATCH_BYTES", 10 * most + 9)
    sizes: list[int] = []

    def product(x: jax.Array, slots: jax.Array) -> jax.Array:
        sizes.append(len(x))
        return x * slots[:, None, None].astype(x.dtype)

    x, slots = jnp.asarray(rng().normal(size=(7, 2, 3)), jnp.float32), jnp.arange(7)
    expected = np.asarray(x) * np.arange(7, dtype=np.float32)[:, None, None]
    np.testing.assert_array_equal(windows.in_chunks(product, x, slots, 10), expected)
    assert sum(sizes) == 7 and max(sizes) <= max(most, 1)
    assert len(sizes) == -(-7 // min(max(most, 1), 7))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_signs_are_one_and_minus_one(dtype: str) -> None:
    plus = rng().random((16, 24)) < 0.5
    found = signs(jnp.asarray(pack_planes(plus)), jnp.dtype(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.where(plus, 1.0, -1.0))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_mask_plus_its_complement_is_the_weight(dtype: str) -> None:
    r = rng()
    w, _ = rounded(r.normal(size=(16, 24)), dtype)
    mask = r.random((16, 24)) < 0.5
    kept, dropped = (np.asarray(apply_mask(w, jnp.asarray(pack_planes(m))), np.float32) for m in (mask, ~mask))
    np.testing.assert_array_equal(kept + dropped, np.asarray(w, np.float32))
    np.testing.assert_array_equal(kept != 0, mask)


def test_planes_are_laid_out_as_the_file_format_says() -> None:
    mask = rng().random((3, 40)) < 0.5
    planes = pack_planes(mask)
    for column in range(40):
        bit, byte = divmod(column, 5)
        np.testing.assert_array_equal((planes[:, byte] >> bit) & 1, mask[:, column])
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_planes(np.ones((2, 12), bool))


@pytest.mark.parametrize("outputs", [1, 24, 256, 257, 3072])
def test_columns_of_one_byte_are_what_they_were(outputs: int) -> None:
    """Lists of several lengths in one array; entries behind the last are past all columns, whatever their byte is."""
    r, n = rng(), 400
    lists = [np.sort(r.integers(0, outputs, count)) for count in (0, 1, 7, n)]
    cols, ends = np.full((len(lists), n), 255, np.uint8), np.zeros((len(lists), -(-outputs // 256)), np.int32)
    for at, each in enumerate(lists):
        cols[at, : len(each)], ends[at] = pack_columns(each, outputs)
    found = np.asarray(unpack_columns(jnp.asarray(cols), jnp.asarray(ends)))
    for own, each in zip(found, lists, strict=True):
        np.testing.assert_array_equal(own[: len(each)], each)
        assert (own[len(each) :] >= outputs).all()


@pytest.mark.parametrize("candidate", candidates("sparse_matmul"))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sparse_matmul(dtype: str, candidate: str) -> None:
    r = rng()
    x, x64 = rounded(r.normal(size=(12, 16)), dtype)
    dense = r.normal(size=(SLOTS, LAYERS, 16, 24)) * (r.random((SLOTS, LAYERS, 16, 24)) < 0.1)
    dense[1, LAYER, :, 3] = r.normal(size=16)  # a skewed support: one full column
    most = int((dense != 0).sum((-1, -2)).max()) + 5
    rows, cols = np.zeros((SLOTS, LAYERS, most), np.uint16), np.zeros((SLOTS, LAYERS, most), np.uint8)
    ends = np.zeros((SLOTS, LAYERS, 1), np.int32)
    values = np.zeros((SLOTS, LAYERS, most))
    for slot in range(SLOTS):
        for layer in range(LAYERS):
            c, i = np.nonzero(dense[slot, layer].T)
            rows[slot, layer, : len(i)] = i
            cols[slot, layer, : len(c)], ends[slot, layer] = pack_columns(c, 24)
            values[slot, layer, : len(i)] = dense[slot, layer][i, c]
    bank, values64 = stored(values, dtype)
    y = r.normal(size=(12, 24)).astype(np.float32)
    lists = jnp.asarray(rows), jnp.asarray(cols), jnp.asarray(ends)
    found = np.asarray(sparse_matmul(x, jnp.asarray(y), *lists, bank, make_runs(), 6, LAYER, candidate))
    expected = y.astype(np.float64)
    for slot, tokens in RUN_TOKENS.items():
        d = np.zeros((16, 24))
        used = slice(int(ends[slot, LAYER, 0]))
        d[rows[slot, LAYER][used], cols[slot, LAYER][used]] = values64[slot, LAYER][used]
        expected[list(tokens)] += x64[list(tokens)] @ d
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("candidate", candidates("block_sparse_matmul"))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_block_sparse_matmul(dtype: str, candidate: str) -> None:
    """Blocks of 8 x 8; one slot has every block of a column, one none at all."""
    r = rng()
    x, x64 = rounded(r.normal(size=(12, 16)), dtype)
    places = {1: [(0, 1), (1, 1)], 3: [(1, 0), (0, 2)], 2: []}
    rows, cols = np.zeros((SLOTS, LAYERS, 5), np.uint16), np.zeros((SLOTS, LAYERS, 5), np.uint8)
    ends = np.zeros((SLOTS, LAYERS, 1), np.int32)
    bank, blocks64 = stored(r.normal(size=(SLOTS, LAYERS, 5, 8, 8)), dtype)
    for slot, own in places.items():
        for entry, (row, col) in enumerate(own):
            rows[slot, LAYER, entry], cols[slot, LAYER, entry] = row, col
        ends[slot, LAYER] = len(own)
    y = r.normal(size=(12, 24)).astype(np.float32)
    lists = jnp.asarray(rows), jnp.asarray(cols), jnp.asarray(ends)
    found = np.asarray(block_sparse_matmul(x, jnp.asarray(y), *lists, bank, make_runs(), 6, LAYER, candidate))
    expected = y.astype(np.float64)
    for slot, tokens in RUN_TOKENS.items():
        d = np.zeros((16, 24))
        for entry, (row, col) in enumerate(places[slot]):
            d[8 * row : 8 * row + 8, 8 * col : 8 * col + 8] = blocks64[slot, LAYER, entry]
        expected[list(tokens)] += x64[list(tokens)] @ d
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    "attention",
    [packed_attention, functools.partial(packed_attention_cudnn, implementation="xla")],
    ids=["xla", "cudnn"],
)
def test_packed_attention_equals_each_query_alone(attention: Callable[..., jax.Array]) -> None:
    r, heads, size = rng(), 2, 8
    lengths, starts = [5, 3, 9], [0, 5, 8]
    q, k, v = (r.normal(size=(18, heads * size)).astype(np.float32) for _ in range(3))
    for part in (q, k, v):
        part[17] = np.nan  # of no query
    tokens = [np.full((3, 6), 17, np.int32), np.full((1, 10), 17, np.int32)]
    cells = np.zeros(18, np.int32)
    for group, row, query in ((0, 0, 1), (0, 1, 0), (1, 0, 2)):
        span = np.arange(starts[query], starts[query] + lengths[query])
        tokens[group][row] = span[0]
        tokens[group][row, : len(span)] = span
        cells[span] = (18 if group else row * 6) + np.arange(len(span))
    groups = (
        AttentionGroup(jnp.asarray(tokens[0]), jnp.array([3, 5, 0], jnp.int32)),
        AttentionGroup(jnp.asarray(tokens[1]), jnp.array([9], jnp.int32)),
    )
    found = np.asarray(attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), groups, jnp.asarray(cells), heads))
    for start, length in zip(starts, lengths, strict=True):
        own = slice(start, start + length)
        a, b, c = (part[own].reshape(length, heads, size).astype(np.float64) for part in (q, k, v))
        scores = np.einsum("qhs,khs->hqk", a, b) / size**0.5
        probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        expected = np.einsum("hqk,khs->qhs", probs, c).reshape(length, -1)
        np.testing.assert_allclose(found[own], expected, atol=1e-5)
