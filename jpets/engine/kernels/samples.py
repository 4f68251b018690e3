"""Random operands of each operator's calls, with NaN in all that no candidate may read.

Sizes are a call's own. Tokens lie as in a full batch: a row's run after the other, a few tokens of no row between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from jpets.engine.kernels.calls import Call, Sample
from pallas_kernels.packed_attention import AttentionGroup, Prefix
from pallas_kernels.sparse_matmul.columns import TILE
from pallas_kernels.windows import Runs

Numbers = np.ndarray[Any, np.dtype[Any]]
FILLED = 0.9
"""Share of a sparse difference's list that has entries; the rest is padding."""
GAP = 0.1
"""Share of rows behind which a token is no row's."""


def masked_matmul(call: Call, rng: np.random.Generator) -> Sample:
    x, y, w, bits, runs, *rest = call.operands
    laid, own, _ = _runs(runs, x.shape[0], _size(call), bits.shape[0], rng)
    inputs, before = _inputs(x, own, rng), _normal(y, rng)
    weights = _normal(w, rng, w.shape[0] ** -0.5)
    return Sample((inputs, before, weights, _bytes(bits, rng), laid, *rest), call.settings, own, before)


def sign_matmul(call: Call, rng: np.random.Generator) -> Sample:
    x, y, bits, scale, runs, *rest = call.operands
    laid, own, unused = _runs(runs, x.shape[0], _size(call), bits.shape[0], rng)
    inputs, before = _inputs(x, own, rng), _normal(y, rng)
    scales = np.full(scale.shape, np.nan, np.float32)
    scales[~unused] = rng.random(scales[~unused].shape) / x.shape[1] ** 0.5
    return Sample((inputs, before, _bytes(bits, rng), scales, laid, *rest), call.settings, own, before)


def sparse_matmul(call: Call, rng: np.random.Generator) -> Sample:
    """Also for blocks: then rows and columns count blocks, and the padding's blocks are NaN."""
    x, y, rows, cols, ends, values, runs, *rest = call.operands
    laid, own, unused = _runs(runs, x.shape[0], _size(call), rows.shape[0], rng)
    inputs, before = _inputs(x, own, rng), _normal(y, rng)
    side = values.shape[-1] if len(values.shape) > 3 else 1
    high, wide = x.shape[1] // side, y.shape[1] // side
    slots, layers, most = rows.shape
    count = max(1, min(round(FILLED * most), high * wide // 2))
    steps = rng.integers(1, high * wide // count + 1, (slots, layers, count))
    columns, held = np.divmod(np.cumsum(steps, axis=-1) - 1, high)  # rising, without repeats
    places, bytes_ = np.zeros(rows.shape, np.uint16), np.full(cols.shape, 255, np.uint8)
    places[..., :count] = held
    bytes_[..., :count] = columns % TILE
    tile_ends = (columns[..., None] // TILE <= np.arange(ends.shape[-1])).sum(-2).astype(np.int32)
    numbers = np.zeros(values.shape, np.float32) if side == 1 else np.full(values.shape, np.nan, np.float32)
    numbers[:, :, :count] = rng.standard_normal(numbers[:, :, :count].shape, np.float32)
    numbers[unused] = np.nan
    lists = (places, bytes_, tile_ends, _stored(numbers, values.dtype))
    return Sample((inputs, before, *lists, laid, *rest), call.settings, own, before)


def low_rank(call: Call, rng: np.random.Generator) -> Sample:
    """Some groups have slot 0; one slot is nobody's."""
    x, down, up, slots, *rest = call.operands
    own = rng.integers(0, max(1, down.shape[0] - 1), slots.shape).astype(np.int32)
    unused = np.ones(down.shape[0], bool)
    unused[own] = False
    settings = dict(call.settings)
    banks = [_bank(each, unused, rng, each.shape[-2] ** -0.5) for each in (down, up)]
    for name in ("down_bias", "up_bias"):
        if settings.get(name) is not None:
            settings[name] = _bank(settings[name], unused, rng)
    return Sample((_normal(x, rng), *banks, own, *rest), settings)


def linear(call: Call, rng: np.random.Generator) -> Sample:
    """All tokens count."""
    x, w, *rest = call.operands
    return Sample((_normal(x, rng), _normal(w, rng, w.shape[0] ** -0.5), *rest), call.settings)


def packed_attention(call: Call, rng: np.random.Generator) -> Sample:
    """Rows of half their group's length to the whole of it, as many as there are tokens for."""
    q, k, v, groups, cells, heads, *rest = call.operands
    tokens, width = q.shape
    parts = [np.full(each.shape, np.nan, np.float32) for each in (q, k, v)]
    own = np.zeros(tokens, bool)
    place = np.zeros(tokens, np.int32)
    laid, at, first = [], 0, 0
    for group in groups:
        rows = group.lengths.shape[0]
        length = tokens // rows if group.tokens is None else group.tokens.shape[1]
        lengths = np.zeros(rows, np.int32)
        cell_tokens = np.full((rows, length), tokens - 1, np.int32)
        for row in range(rows):
            begin = row * length if group.tokens is None else at
            count = min(int(rng.integers(max(1, length // 2), length + 1)), tokens - begin)
            if count < 1:
                continue
            span = np.arange(begin, begin + count)
            lengths[row], own[span], at = count, True, begin + count
            cell_tokens[row] = begin
            cell_tokens[row, :count] = span
            place[span] = first + row * length + np.arange(count)
        first += rows * length
        laid.append(AttentionGroup(*_arrays(None if group.tokens is None else cell_tokens, lengths)))
    for part in parts:
        part[own] = rng.standard_normal((int(own.sum()), width), np.float32)
        part[~own] = 0.0 if cells is None else np.nan  # padding in a rectangle is computed, and masked out
    prefixes = [_prefixes(each, rng) for each in rest]
    found = [part.astype(each.dtype) for part, each in zip(parts, (q, k, v), strict=True)]
    return Sample((*found, tuple(laid), None if cells is None else place, heads, *prefixes), call.settings, own)


def _prefixes(prefixes: Any, rng: np.random.Generator) -> Any:
    def prefix(each: Prefix) -> Prefix:
        counts = rng.integers(0, each.key.shape[1] + 1, each.counts.shape).astype(np.int32)
        return Prefix(*_arrays(_normal(each.key, rng), _normal(each.value, rng), counts))

    return [prefix(each) for each in prefixes]


def _size(call: Call) -> int:
    """Tokens of the longest run."""
    place = {"masked_matmul": 5, "sign_matmul": 5}.get(call.operator, 7)
    return int(call.settings["size"] if "size" in call.settings else call.operands[place])


def _runs(
    runs: Runs, tokens: int, size: int, slots: int, rng: np.random.Generator
) -> tuple[Runs, np.ndarray[Any, np.dtype[np.bool_]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Runs that fill a batch, the tokens that are theirs, and the slots that none of them has."""
    capacity = runs.slots.shape[0]
    rows = max(1, capacity - tokens // size)
    entries = list(_spans(tokens, size, rows, capacity, slots, rng))
    own, unused = np.zeros(tokens, bool), np.ones(slots, bool)
    columns = np.zeros((4, capacity), np.int32)
    for number, (slot, begin, end) in enumerate(entries):
        start = min(begin, tokens - size)
        columns[:, number] = slot, start, begin - start, end - begin
        own[begin:end], unused[slot] = True, False
    return Runs(*_arrays(np.int32(len(entries)), *columns)), own, unused


def _spans(
    tokens: int, size: int, rows: int, capacity: int, slots: int, rng: np.random.Generator
) -> Iterator[tuple[int, int, int]]:
    """(slot, first token, past the last) of each run."""
    at = used = 0
    longest = max(1, tokens // rows)
    for row in range(rows):
        left = min(int(rng.integers(max(1, longest // 2), longest + 1)), tokens - at)
        slot = 1 + row % max(1, slots - 2)
        while left > 0 and used < capacity:
            yield slot, at, at + min(left, size)
            used += 1
            at, left = at + min(left, size), left - size
        at += rng.random() < GAP


def _arrays(*arrays: Any) -> Any:
    """Of the host, for fields that hold a program's arrays."""
    return arrays


def _inputs(x: Any, own: np.ndarray[Any, np.dtype[np.bool_]], rng: np.random.Generator) -> Numbers:
    drawn = _normal(x, rng)
    drawn[~own] = np.nan
    return drawn


def _bank(bank: Any, unused: Numbers, rng: np.random.Generator, scale: float = 1.0) -> Numbers:
    numbers = rng.standard_normal(bank.shape, np.float32) * np.float32(scale)
    numbers[unused] = np.nan
    return _stored(numbers, bank.dtype)


def _stored(numbers: Numbers, dtype: Any) -> Numbers:
    """In the form of a bank: bf16 may be kept as uint16."""
    return numbers.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == np.uint16 else numbers.astype(dtype)


def _normal(like: Any, rng: np.random.Generator, scale: float = 1.0) -> Numbers:
    drawn: Numbers = (rng.standard_normal(like.shape, np.float32) * np.float32(scale)).astype(like.dtype)
    return drawn


def _bytes(like: Any, rng: np.random.Generator) -> Numbers:
    return rng.integers(0, 256, like.shape, np.uint8)
