"""The tensors of a checkpoint folder, as NumPy arrays."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from checkpoints.torch_file import read_torch
from jpets.errors import InvalidBackbone
from jpets.files import read_bounded

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
MOST_INDEX_BYTES = 16 << 20
LARGEST_SINGLE = float(np.finfo(np.float32).max)


def read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Name -> array of every tensor in a safetensors file (bf16 as ``ml_dtypes``). Raises ``InvalidBackbone``."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (safetensors.SafetensorError, TypeError, AttributeError, ValueError) as error:  # of what NumPy has not
        raise InvalidBackbone(f"{path.name}: {error}; download or save the file again") from error


def within_single(tensors: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The tensors, which are used in f32. Raises ``InvalidBackbone`` for those in f64 with numbers beyond it."""
    beyond = [name for name, array in tensors.items() if array.dtype == np.float64 and _largest(array) > LARGEST_SINGLE]
    if beyond:
        listed = ", ".join(name[:120] for name in beyond[:5])
        raise InvalidBackbone(
            f"expected numbers that are finite in f32, found larger ones in {listed}; look how it was trained"
        )
    return tensors


def _largest(array: npt.NDArray[np.float64]) -> float:
    """The largest magnitude beside NaN, without a copy: many tensors may share one storage."""
    return max(np.fmax.reduce(array, axis=None, initial=0.0), -np.fmin.reduce(array, axis=None, initial=0.0))


READERS = {SAFETENSORS: read_safetensors, TORCH: read_torch}


def read_tensors(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of ``model.safetensors``, or else of ``pytorch_model.bin``, whole or in shards with their index.

    Raises ``InvalidBackbone``, also for an index that names files outside the folder.
    """
    for name, read in READERS.items():
        if (folder / name).is_file():
            return within_single(read(folder / name))
        if (index := index_of(folder / name)).is_file():
            tensors: dict[str, npt.NDArray[Any]] = {}
            for shard in _shards(index):
                tensors |= within_single(read(shard))
            return tensors
    raise InvalidBackbone(f"expected {' or '.join(READERS)} in the folder, found neither")


def index_of(weights: Path) -> Path:
    """The file that says which shards hold the tensors where they do not lie in one file."""
    return weights.with_name(f"{weights.name}.index.json")


def shard_names(index: Path) -> list[str]:
    """Names of files beside the index. Raises ``InvalidBackbone``, also for names that lead elsewhere."""
    try:
        names = {str(name) for name in json.loads(read_bounded(index, MOST_INDEX_BYTES))["weight_map"].values()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InvalidBackbone(f"{index.name}: expected a weight_map of file names; download the file again") from error
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            raise InvalidBackbone(f"{index.name}: expected names of files in the folder, found {name[:100]!r}")
    return sorted(names)


def _shards(index: Path) -> list[Path]:
    shards = [index.parent / name for name in shard_names(index)]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise InvalidBackbone(
            f"{index.name}: expected {missing[0][:100]!r} in the folder, found nothing (of {len(shards)} files "
            f"{len(missing)} are missing); download the model again"
        )
    return shards
