"""The tensors of a checkpoint folder, as NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt
import safetensors

from checkpoints.torch_file import read_torch
from jpets.errors import InvalidBackbone

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"


def read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Name -> array of every tensor in a safetensors file (bf16 as ``ml_dtypes``). Raises ``InvalidBackbone``."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (safetensors.SafetensorError, TypeError) as error:
        raise InvalidBackbone(f"{path.name}: {error}; download or save the file again") from error


def read_tensors(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of ``model.safetensors``, or else of ``pytorch_model.bin``. Raises ``InvalidBackbone``."""
    if (folder / SAFETENSORS).is_file():
        return read_safetensors(folder / SAFETENSORS)
    if (folder / TORCH).is_file():
        return read_torch(folder / TORCH)
    raise InvalidBackbone(f"expected {SAFETENSORS} or {TORCH} in the folder, found neither")
