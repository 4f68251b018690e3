"""The file of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from checkpoints.tensors import read_safetensors, within_single
from checkpoints.torch_file import read_torch
from jpets.errors import InvalidTask


def read_one_of(folder: Path, names: Sequence[str]) -> Mapping[str, npt.NDArray[Any]]:
    """The tensors of the first of ``names`` that is in the folder. Raises ``InvalidTask``, ``InvalidBackbone``."""
    for name in names:
        if (folder / name).is_file():
            return within_single((read_safetensors if name.endswith(".safetensors") else read_torch)(folder / name))
    raise InvalidTask(f"expected {' or '.join(names)} in the folder, found neither")
