"""Files of tensors that NumPy cannot hold, or that f32 cannot."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.imports.tensor_files import read_one_of
from checkpoints.tensors import SAFETENSORS, read_safetensors, read_tensors
from jpets.errors import InvalidBackbone


def with_shape(path: Path, shape: list[int], data: bytes) -> Path:
    header: dict[str, Any] = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}
    described = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(described)) + described + data)
    return path


@pytest.mark.parametrize(("shape", "data"), [([0, 2**62], b""), ([1] * 100, bytes(4))])
def test_shapes_that_no_array_has_are_refused(shape: list[int], data: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidBackbone, match=r"^model\.safetensors: "):
        read_safetensors(with_shape(tmp_path / SAFETENSORS, shape, data))


def test_numbers_beyond_f32_are_refused_by_name(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    good = np.array([[1e30, -1e30], [1e-300, 0]])
    for number in (1e300, -1e300, np.inf):
        large = good.copy()
        large[1, 1], large[0, 1] = number, np.nan
        save_file({"good": good, "large": large, "none": good[:0]}, tmp_path / SAFETENSORS)
        for read in (
            functools.partial(read_tensors, tmp_path),
            functools.partial(read_one_of, tmp_path, [SAFETENSORS]),
        ):
            with pytest.raises(InvalidBackbone, match="finite in f32, found larger ones in large;"):
                read()
    save_file({"good": good, "none": good[:0]}, tmp_path / SAFETENSORS)
    assert set(read_one_of(tmp_path, [SAFETENSORS])) == set(read_tensors(tmp_path)) == {"good", "none"}
    assert not recwarn
