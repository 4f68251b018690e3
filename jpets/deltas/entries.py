"""Sparse differences as lists of entries: row, column and value of single non-zeros, or of whole square blocks.

Entries of a layer are sorted by column, then row; with blocks rows and columns count blocks, and a value is a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jpets.deltas.protocol import site_layers
from jpets.errors import InvalidTask
from jpets.types import Delta
from pallas_kernels.numerics import AnyArray
from pallas_kernels.sparse_matmul import pack_columns

Entries = tuple[Integer[np.ndarray, " _"], Integer[np.ndarray, " _"], Float[AnyArray, "_ ..."]]
"""Rows [n], columns [n] and values [n] or [n, block, block]."""


def diff_delta(
    weights: Mapping[str, Mapping[int, Float[np.ndarray, "_ _"]]],
    biases: Mapping[str, Mapping[int, Float[np.ndarray, " _"]]],
    layers: Sequence[int],
    block: int = 1,
) -> Delta:
    """A delta from dense, mostly zero differences ``weights[site][layer]`` [in, out] and ``biases[site][layer]``.

    With ``block`` above 1 it keeps every block of that many rows and columns that is not all zero.
    """
    tensors: dict[str, npt.NDArray[Any]] = {}
    for site, by_layer in weights.items():
        parts = [_entries(by_layer[layer], block) for layer in site_layers(site, tuple(layers))]
        tensors |= _stack(site, parts)
    for site, by_layer in biases.items():
        found = [(np.flatnonzero(by_layer[at]), by_layer[at]) for at in site_layers(site, tuple(layers))]
        tensors[f"{site}/bias_cols"] = np.concatenate([at for at, _ in found]).astype(np.uint16)
        tensors[f"{site}/bias_values"] = np.concatenate([value[at] for at, value in found]).astype(np.float32)
        tensors[f"{site}/bias_offsets"] = np.cumsum([0, *(len(at) for at, _ in found)]).astype(np.int32)
    settings: dict[str, Any] = {"sites": list(weights), "bias_sites": list(biases), "layers": list(layers)}
    if block > 1:
        settings["block"] = block
    return Delta("diff", settings, tensors)


def block_norms(dense: Float[np.ndarray, "*l i o"], block: int) -> Float[np.ndarray, "*l a b"]:
    """[..., in / block, out / block]: the norms of the blocks of [..., in, out]; magnitudes if blocks are 1 x 1."""
    if block == 1:
        return np.abs(dense)
    *lead, inputs, outputs = dense.shape
    tiles = dense.reshape(*lead, inputs // block, block, outputs // block, block)
    return np.sqrt((tiles * tiles).sum((-3, -1)))


def spread_blocks(chosen: Bool[np.ndarray, "*l a b"], block: int) -> Bool[np.ndarray, "*l i o"]:
    """Chosen blocks [..., a, b] as chosen numbers [..., a * block, b * block]."""
    return chosen if block == 1 else np.repeat(np.repeat(chosen, block, -2), block, -1)


def _entries(dense: npt.NDArray[Any], block: int) -> Entries:
    """Rows and columns of the blocks that are not all zero, by column, and the blocks; scalars if they are 1 x 1."""
    if block == 1:
        cols, rows = np.nonzero(dense.T)
        return rows, cols, dense[rows, cols]
    inputs, outputs = dense.shape
    tiles = dense.reshape(inputs // block, block, outputs // block, block).swapaxes(1, 2)
    cols, rows = np.nonzero(tiles.any((2, 3)).T)
    return rows, cols, tiles[rows, cols]


def _stack(site: str, parts: Sequence[Entries]) -> dict[str, npt.NDArray[Any]]:
    rows, cols, values = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return {
        f"{site}/rows": rows.astype(np.uint16),
        f"{site}/cols": cols.astype(np.uint16),
        f"{site}/values": values.astype(np.float32),
        f"{site}/layer_offsets": np.cumsum([0, *(len(part[0]) for part in parts)]).astype(np.int32),
    }


def value_shape(block: int) -> tuple[int, ...]:
    return (block, block) if block > 1 else ()


def slot_lists(
    site: str, parts: Sequence[Entries], size: int, outputs: int
) -> dict[str, Shaped[np.ndarray, "layers ..."]]:
    """A site's arrays of a slot, from each layer's entries: lists of ``size``, zeros behind the entries."""
    packed = [(rows, *pack_columns(cols, outputs), values) for rows, cols, values in parts]
    rows, cols, ends, values = zip(*packed, strict=True)
    lists = {"rows": rows, "cols": cols, "values": values}
    stacked = {f"{site}/{name}": np.stack([_padded(each, size) for each in own]) for name, own in lists.items()}
    return stacked | {f"{site}/ends": np.stack(ends)}


def _padded(entries: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    return np.pad(entries, [(0, size - len(entries)), *[(0, 0)] * (entries.ndim - 1)])


def add_entries(w: Float[Array, "i o"], entries: Entries) -> Float[Array, "i o"]:
    rows, cols, values = entries
    if values.ndim == 1:
        return w.at[rows, cols].add(jnp.asarray(values, w.dtype))
    side = values.shape[-1]
    tiles = w.reshape(w.shape[0] // side, side, w.shape[1] // side, side)
    return tiles.at[rows, :, cols].add(jnp.asarray(values, w.dtype)).reshape(w.shape)


def by_layer(delta: Delta, site: str) -> list[Entries]:
    offsets = delta.tensors[f"{site}/layer_offsets"]
    spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
    rows, cols, values = (delta.tensors[f"{site}/{name}"] for name in ("rows", "cols", "values"))
    return [(rows[span], cols[span], values[span]) for span in spans]


def check_entries(delta: Delta, site: str, names: tuple[str, ...], offsets_name: str, limits: tuple[int, ...]) -> None:
    offsets = delta.tensors[f"{site}/{offsets_name}"].astype(np.int64)
    arrays = [delta.tensors[f"{site}/{name}"] for name in names]
    counts = {len(array) for array in arrays}
    if len(counts) != 1 or offsets[0] != 0 or np.any(np.diff(offsets) < 0) or offsets[-1] != counts.pop():
        raise InvalidTask(f"diff: {site}/{offsets_name} must rise from 0 to the number of entries of {list(names)}")
    for array, name, limit in zip(arrays, names, limits, strict=False):
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < limit):
            raise InvalidTask(f"diff: {site}/{name} must lie in 0..{limit - 1}, found {array.min()}..{array.max()}")
    places = arrays[-2].astype(np.int64) if len(limits) == 1 else arrays[1].astype(np.int64) * limits[0] + arrays[0]
    first_of_layer = np.zeros(len(places) + 1, bool)
    first_of_layer[offsets] = True
    if np.any((np.diff(places) <= 0) & ~first_of_layer[1:-1]):
        raise InvalidTask(f"diff: entries of {site} must be sorted by column, then row, without repeats, in each layer")
