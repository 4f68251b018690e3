"""Diff-pruning: x W + x D with a sparse D, and sparse bias differences (Guo et al. 2020; PetS section 3.1).

D has single non-zeros or, where it was trained or extracted so (structured Diff-pruning), whole square blocks: entries
then count blocks, and the value of an entry is a block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float

from jpets.config import BackboneConfig
from jpets.deltas.bitfit import BIAS_CLASS, bias_sites
from jpets.deltas.merge import map_kernels
from jpets.deltas.protocol import (
    PARAM_BYTES,
    SUM_BYTES,
    ArraySpec,
    Bound,
    ClassKey,
    Contribution,
    Method,
    Params,
    Place,
    TensorSpec,
    Work,
    covered_layers,
    covered_sites,
    layer_bytes,
    normal,
    site_layers,
)
from jpets.deltas.view import HeavyView
from jpets.errors import InvalidTask
from jpets.types import Delta
from pallas_kernels.sparse_matmul import block_sparse_matmul, pack_columns, sparse_matmul, tiles_of

Entries = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def diff_delta(
    weights: Mapping[str, Mapping[int, npt.NDArray[Any]]],
    biases: Mapping[str, Mapping[int, npt.NDArray[Any]]],
    layers: Sequence[int],
    block: int = 1,
) -> Delta:
    """A delta from dense, mostly zero differences ``weights[site][layer]`` [in, out] and ``biases[site][layer]``.

    With ``block`` above 1 it keeps every block of so many rows and columns that is not all zero.
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


def block_norms(dense: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
    """[..., in / block, out / block]: the norms of the blocks of [..., in, out]; magnitudes where they are 1 x 1."""
    if block == 1:
        return np.abs(dense)
    *lead, inputs, outputs = dense.shape
    tiles = dense.reshape(*lead, inputs // block, block, outputs // block, block)
    return np.sqrt((tiles * tiles).sum((-3, -1)))


def spread_blocks(chosen: npt.NDArray[np.bool_], block: int) -> npt.NDArray[np.bool_]:
    """Chosen blocks [..., a, b] as chosen numbers [..., a * block, b * block]."""
    return chosen if block == 1 else np.repeat(np.repeat(chosen, block, -2), block, -1)


def _entries(dense: npt.NDArray[Any], block: int) -> Entries:
    """Rows and columns of the blocks that are not all zero, by column, and the blocks; scalars where they are 1 x 1."""
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


def count_step(count: int, block: int = 1) -> int:
    """Entries a layer, rounded up so that tasks of like density share a class: a sixteenth of a power of two."""
    step = max(1, 64 // block**2, 2 ** max(0, count.bit_length() - 4))
    return -(-count // step) * step


class Diff(Method):
    """Settings: ``sites``, ``bias_sites``, ``layers``, ``block`` (1). Tensors of a weight: ``rows`` and ``cols`` [n],
    sorted by column, ``values`` [n], ``layer_offsets`` [layers + 1]; of a bias: ``bias_cols``, ``bias_values``,
    ``bias_offsets``. With blocks ``rows`` and ``cols`` count blocks, and ``values`` is [n, block, block]."""

    name = "diff"
    kind = "heavy"
    step = "sums"

    def _sites(self, settings: Mapping[str, Any], config: BackboneConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
        sites = covered_sites(settings, config) if settings.get("sites", True) else ()
        known = bias_sites(config)
        biased = settings.get("bias_sites", ())
        if set(biased) - set(known) or not (sites or biased):
            raise InvalidTask(f"diff: bias_sites must be some of {list(known)}, got {list(biased)}")
        return sites, tuple(site for site in known if site in biased)

    def _block(self, settings: Mapping[str, Any], config: BackboneConfig) -> int:
        block, sites = settings.get("block", 1), self._sites(settings, config)[0]
        if not isinstance(block, int) or block < 1 or any(size % block for s in sites for size in config.dims(s)):
            raise InvalidTask(f"diff: block must be a whole number that divides the sizes of its sites, got {block!r}")
        return block

    def tensors(self, settings: Mapping[str, Any], config: BackboneConfig) -> Mapping[str, TensorSpec]:
        layers = covered_layers(settings, config)
        sites, biased = self._sites(settings, config)
        shape = _value_shape(self._block(settings, config))
        specs: dict[str, TensorSpec] = {}
        for site in sites:
            specs |= {f"{site}/{part}": TensorSpec((None,), "index") for part in ("rows", "cols")}
            specs[f"{site}/values"] = TensorSpec((None, *shape))
            specs[f"{site}/layer_offsets"] = TensorSpec((len(site_layers(site, layers)) + 1,), "index")
        for site in biased:
            specs[f"{site}/bias_cols"] = TensorSpec((None,), "index")
            specs[f"{site}/bias_values"] = TensorSpec((None,))
            specs[f"{site}/bias_offsets"] = TensorSpec((len(site_layers(site, layers)) + 1,), "index")
        return specs

    def check(self, delta: Delta, config: BackboneConfig) -> None:
        sites, biased = self._sites(delta.settings, config)
        layout, block = config.bias_layout(), self._block(delta.settings, config)
        for site in sites:
            inputs, outputs = (size // block for size in config.dims(site))
            _check_entries(delta, site, ("rows", "cols", "values"), "layer_offsets", (inputs, outputs))
        for site in biased:
            part = layout[0, site]
            _check_entries(delta, site, ("bias_cols", "bias_values"), "bias_offsets", (part.stop - part.start,))

    def init(
        self, rng: np.random.Generator, settings: Mapping[str, Any], config: BackboneConfig, scale: float
    ) -> Delta:
        """``density`` (0.005 by default) of every weight, in whole blocks if asked, and of every bias."""
        layers, density = covered_layers(settings, config), float(settings.get("density", 0.005))
        layout, block = config.bias_layout(), self._block(settings, config)
        sites = covered_sites(settings, config)

        def sparse(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
            side = block if len(shape) == 2 else 1
            chosen = np.zeros(int(np.prod(shape)) // side ** len(shape), bool)
            chosen[rng.choice(chosen.size, max(1, round(chosen.size * density)), replace=False)] = True
            chosen = chosen.reshape([size // side for size in shape])
            for axis in range(len(shape)):
                chosen = chosen.repeat(side, axis)
            dense = np.zeros(shape, np.float32)
            dense[chosen] = normal(rng, scale, (int(chosen.sum()),))
            return dense

        weights = {site: {layer: sparse(config.dims(site)) for layer in site_layers(site, layers)} for site in sites}
        biases = {site: {layer: sparse((config.dims(site)[1],)) for layer in weights[site]} for site in sites}
        assert all((layer, site) in layout for site in biases for layer in biases[site])
        return diff_delta(weights, biases, layers, block)

    def lower(self, delta: Delta, config: BackboneConfig) -> Sequence[Contribution]:
        layers, layout = covered_layers(delta.settings, config), config.bias_layout()
        sites, biased = self._sites(delta.settings, config)
        block = self._block(delta.settings, config)
        found: list[Contribution] = []
        sizes: list[tuple[str, int]] = []
        arrays: dict[str, npt.NDArray[Any]] = {}
        for site in sites:
            if site == "pooler":
                continue
            parts = list(_by_layer(delta, site))
            size = count_step(max(len(rows) for rows, _, _ in parts), block)
            sizes.append((site, size))
            arrays |= _slot(site, parts, size, config.dims(site)[1] // block)
        if sizes:
            options = (("block", str(block)),) if block > 1 else ()
            found.append(Contribution(ClassKey("diff", tuple(sizes), layers, options), arrays))
        if biased:
            change = np.zeros(config.bias_size(), np.float32)
            for site in biased:
                offsets = delta.tensors[f"{site}/bias_offsets"]
                for at, layer in enumerate(site_layers(site, layers)):
                    part = slice(int(offsets[at]), int(offsets[at + 1]))
                    cols = layout[layer, site].start + delta.tensors[f"{site}/bias_cols"][part].astype(np.int64)
                    change[cols] = delta.tensors[f"{site}/bias_values"][part]
            found.append(Contribution(BIAS_CLASS, {"change": change}))
        return found

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        specs: dict[str, ArraySpec] = {}
        block = _block_of(key)
        for site, count in key.sites:
            shape = (len(key.layers), count)
            specs[f"{site}/rows"] = ArraySpec(shape, "uint16")
            specs[f"{site}/cols"] = ArraySpec(shape, "uint8")
            specs[f"{site}/ends"] = ArraySpec((len(key.layers), tiles_of(config.dims(site)[1] // block)), "int32")
            specs[f"{site}/values"] = ArraySpec((*shape, *_value_shape(block)))
        return specs

    def typical(self, key: ClassKey, config: BackboneConfig) -> Contribution:
        """Non-zeros everywhere: unused entries are dropped before they are added up."""
        rng, block = np.random.default_rng(0), _block_of(key)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for site, count in key.sites:
            inputs, outputs = (size // block for size in config.dims(site))
            places = ((rng.integers(0, inputs, count), np.sort(rng.integers(0, outputs, count))) for _ in key.layers)
            values = normal(rng, 0.01, (len(key.layers), count, *_value_shape(block)))
            parts = [(*place, own) for place, own in zip(places, values, strict=True)]
            arrays |= _slot(site, parts, count, outputs)
        return Contribution(key, arrays)

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        """One multiply-add for each non-zero and token; x is read, y is read and written."""
        flops = sum(2 * tokens * count * _block_of(key) ** 2 for _, count in key.sites)
        dims = [config.dims(site) for site, _ in key.sites]
        moved = sum(PARAM_BYTES * inputs + 2 * SUM_BYTES * outputs for inputs, outputs in dims)
        return Work(flops, tasks * layer_bytes(self.bank_arrays(key, config)) + tokens * moved)

    def total(self, bound: Bound, place: Place, x: Float[Array, "t i"], y: Float[Array, "t o"]) -> Float[Array, "t o"]:
        view, bank = bound.view, bound.bank
        assert isinstance(view, HeavyView)
        lists = (bank[f"{place.site}/{name}"] for name in ("rows", "cols", "ends", "values"))
        at = bound.key.layers.index(place.layer)
        product = block_sparse_matmul if _block_of(bound.key) > 1 else sparse_matmul
        operator = functools.partial(product, size=view.size, layer=at)
        return bound.launch(operator, x, y, *lists, view.runs)

    def merge(self, delta: Delta, config: BackboneConfig, params: Params) -> Params:
        layers, layout = covered_layers(delta.settings, config), config.bias_layout()
        sites, biased = self._sites(delta.settings, config)
        entries = {
            (layer, site): part
            for site in sites
            for layer, part in zip(site_layers(site, layers), _by_layer(delta, site), strict=True)
        }
        merged = map_kernels(params, config, _add_entries, entries)
        bias = merged["bias"]
        for site in biased:
            offsets = delta.tensors[f"{site}/bias_offsets"]
            for at, layer in enumerate(site_layers(site, layers)):
                part = slice(int(offsets[at]), int(offsets[at + 1]))
                cols = layout[layer, site].start + np.asarray(delta.tensors[f"{site}/bias_cols"][part], np.int64)
                bias = bias.at[cols].add(jnp.asarray(delta.tensors[f"{site}/bias_values"][part], bias.dtype))
        return {**merged, "bias": bias}


def _value_shape(block: int) -> tuple[int, ...]:
    return (block, block) if block > 1 else ()


def _block_of(key: ClassKey) -> int:
    return int(key.option("block")) if key.options else 1


def _slot(site: str, parts: Sequence[Entries], size: int, outputs: int) -> dict[str, npt.NDArray[Any]]:
    """A site's arrays of a slot, from each layer's entries: lists of ``size``, zeros behind the entries."""
    packed = [(rows, *pack_columns(cols, outputs), values) for rows, cols, values in parts]
    rows, cols, ends, values = zip(*packed, strict=True)
    lists = {"rows": rows, "cols": cols, "values": values}
    stacked = {f"{site}/{name}": np.stack([_padded(each, size) for each in own]) for name, own in lists.items()}
    return stacked | {f"{site}/ends": np.stack(ends)}


def _padded(entries: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    return np.pad(entries, [(0, size - len(entries)), *[(0, 0)] * (entries.ndim - 1)])


def _add_entries(w: Float[Array, "i o"], entries: Entries) -> Float[Array, "i o"]:
    rows, cols, values = entries
    if values.ndim == 1:
        return w.at[rows, cols].add(jnp.asarray(values, w.dtype))
    side = values.shape[-1]
    tiles = w.reshape(w.shape[0] // side, side, w.shape[1] // side, side)
    return tiles.at[rows, :, cols].add(jnp.asarray(values, w.dtype)).reshape(w.shape)


def _by_layer(delta: Delta, site: str) -> list[Entries]:
    offsets = delta.tensors[f"{site}/layer_offsets"]
    spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
    rows, cols, values = (delta.tensors[f"{site}/{name}"] for name in ("rows", "cols", "values"))
    return [(rows[span], cols[span], values[span]) for span in spans]


def _check_entries(delta: Delta, site: str, names: tuple[str, ...], offsets_name: str, limits: tuple[int, ...]) -> None:
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
