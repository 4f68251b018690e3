"""Deltas out of the difference between a fully fine-tuned model and its backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray, from_params, place_name
from jpets.config import BackboneConfig
from jpets.deltas import merge_deltas
from jpets.deltas.bitfit import bias_sites
from jpets.deltas.entries import block_norms, diff_delta, spread_blocks
from jpets.deltas.lora import lora_delta
from jpets.deltas.onebit import onebit_delta
from jpets.errors import InvalidTask
from jpets.kinds import ExtractionMethod
from jpets.types import Delta

Differences = Mapping[str, Mapping[int, FloatArray]]
MAX_RANK = 128
FLOAT_BYTES, INDEX_BYTES = 4, 2


@dataclasses.dataclass(frozen=True)
class Extraction:
    """How a difference becomes deltas. ``density``, ``block``: of ``diff``; ``rank``, ``energy``: of ``lora``."""

    method: ExtractionMethod
    density: float = 0.005
    """Share of the weights that keep their difference."""
    per_matrix: bool = False
    """The same share of every matrix, instead of the largest differences of all together."""
    block: int = 1
    """Rows and columns of the blocks that are kept whole (structured Diff-pruning)."""
    rank: int = 8
    energy: float | None = None
    """Instead of ``rank``: each matrix gets the ranks, at most 128, that hold this share of its squared difference."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise InvalidTask(f"density must be above 0 and at most 1, got {self.density}")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise InvalidTask(f"energy must be above 0 and at most 1, got {self.energy}")
        if not 1 <= self.rank <= MAX_RANK:
            raise InvalidTask(f"rank must be from 1 to {MAX_RANK}, got {self.rank}")

    def stored_bytes(self, config: BackboneConfig) -> float:
        """About what its deltas take beside the biases, in f32; of ``lora`` by ``rank``."""
        dims = [config.dims(site) for site in config.linear_sites() for _ in config.site_layers(site)]
        weights, ends = sum(inputs * outputs for inputs, outputs in dims), sum(map(sum, dims))
        entry = FLOAT_BYTES + 2 * INDEX_BYTES / self.block**2
        taken = {"diff": self.density * weights * entry, "lora": FLOAT_BYTES * self.rank * ends, "onebit": weights / 8}
        return taken.get(self.method, 0.0)

    def __str__(self) -> str:
        if self.method == "diff":
            shape = f", blocks of {self.block}" if self.block > 1 else ""
            return (
                f"diff of {100 * self.density:g} % of the weights{', each matrix' * self.per_matrix}{shape}, and biases"
            )
        if self.method == "lora":
            return f"lora {f'of rank {self.rank}' if self.energy is None else f'of {self.energy:g} energy'}, and biases"
        return {"bitfit": "bitfit", "onebit": "onebit, and biases"}[self.method]


def extract(tensors: Mapping[str, FloatArray], backbone: Backbone, how: Extraction) -> list[Delta]:
    """Deltas that turn the backbone's parameters into ``tensors`` (canonical names) as nearly as the method can.

    Biases are kept whole beside every method. Embeddings and the norms' scales have no delta: see ``losses``.
    """
    config = backbone.config
    base = from_params(backbone.params, config)
    weights = {
        site: {
            at: tensors[f"{place_name(at, site)}/weight"] - base[f"{place_name(at, site)}/weight"]
            for at in config.site_layers(site)
        }
        for site in config.linear_sites()
    }
    biases = _biases(tensors, config)
    if how.method == "bitfit":
        return biases
    if how.method == "diff":
        return [diff_delta(_largest(weights, how), {}, range(config.layers), how.block), *biases]
    if how.method == "lora":
        return [*_low_rank(weights, how), *biases]
    return [onebit_delta(weights), *biases]


def losses(tensors: Mapping[str, FloatArray], backbone: Backbone, deltas: Sequence[Delta]) -> dict[str, float]:
    """Canonical name -> share of its fine-tuned difference (Frobenius norm) that ``deltas`` lack, where it changed."""
    config = backbone.config
    params = jax.tree.map(jnp.asarray, backbone.params)
    before = from_params(backbone.params, config)
    after = from_params(merge_deltas(deltas, config, params), config)
    found = {}
    for name, tensor in tensors.items():
        change = float(np.linalg.norm(tensor - before[name]))
        if change > 0:
            found[name] = float(np.linalg.norm(tensor - np.asarray(after[name], np.float32))) / change
    return found


def _biases(tensors: Mapping[str, FloatArray], config: BackboneConfig) -> list[Delta]:
    sites = bias_sites(config)
    stacked = {
        f"{site}/bias": np.stack([tensors[f"{place_name(at, site)}/bias"] for at in config.site_layers(site)])
        for site in sites
    }
    return [Delta("bitfit", {"sites": list(sites)}, stacked)]


def _largest(weights: Differences, how: Extraction) -> dict[str, dict[int, FloatArray]]:
    """The differences with all but the largest set to zero: single ones by magnitude, blocks by their norm."""
    sizes = {site: {at: _norms(own, how.block) for at, own in layers.items()} for site, layers in weights.items()}
    every = [own for layers in sizes.values() for own in layers.values()]
    limit = None if how.per_matrix else _threshold(np.concatenate([own.ravel() for own in every]), how.density)

    def kept(site: str, layer: int) -> FloatArray:
        norms = sizes[site][layer]
        chosen = norms > (_threshold(norms.ravel(), how.density) if limit is None else limit)
        return np.where(spread_blocks(chosen, how.block), weights[site][layer], np.float32(0))

    return {site: {layer: kept(site, layer) for layer in layers} for site, layers in weights.items()}


def _norms(own: FloatArray, block: int) -> FloatArray:
    inputs, outputs = own.shape
    if inputs % block or outputs % block:
        raise InvalidTask(f"block must divide every matrix; {block} does not divide {inputs} x {outputs}")
    return block_norms(own, block)


def _threshold(sizes: FloatArray, density: float) -> float:
    """The magnitude above which the kept share lies; zeros are never kept."""
    kept = round(density * sizes.size)
    return float(np.partition(sizes, sizes.size - kept - 1)[sizes.size - kept - 1]) if kept < sizes.size else 0.0


def _low_rank(weights: Differences, how: Extraction) -> list[Delta]:
    """The truncated singular value decomposition of each difference (Eckart and Young 1936)."""
    matrices: dict[str, dict[int, tuple[FloatArray, FloatArray]]] = {}
    alpha: dict[tuple[str, int], float] = {}
    for site, layers in weights.items():
        for layer, own in layers.items():
            a, b = _truncated(own, how)
            if a.shape[1]:
                matrices.setdefault(site, {})[layer] = (a, b)
                alpha[site, layer] = float(a.shape[1])  # the scale is 1
    return [lora_delta(matrices, alpha=alpha)] if matrices else []


def _truncated(own: FloatArray, how: Extraction) -> tuple[FloatArray, FloatArray]:
    """(A [in, r], B [r, out]) of the best approximation, by the eigenvectors of the smaller Gram matrix, in f64."""
    wide = own.shape[0] > own.shape[1]
    matrix = own.T.astype(np.float64) if wide else own.astype(np.float64)
    energies, vectors = np.linalg.eigh(matrix @ matrix.T)
    energies, vectors = np.maximum(energies[::-1], 0), vectors[:, ::-1]
    total = energies.sum()
    if total == 0:
        return np.zeros((own.shape[0], 0), np.float32), np.zeros((0, own.shape[1]), np.float32)
    rank = how.rank if how.energy is None else int(np.searchsorted(np.cumsum(energies) / total, how.energy - 1e-12)) + 1
    rank = min(rank, MAX_RANK, int((energies > total * 1e-14).sum()))
    scale = energies[:rank] ** 0.25  # singular values' square roots: both factors of like size
    left = vectors[:, :rank] * scale
    right = (vectors[:, :rank].T @ matrix) / scale[:, None]
    a, b = (right.T, left.T) if wide else (left, right)
    return a.astype(np.float32), b.astype(np.float32)
