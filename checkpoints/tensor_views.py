"""The tensors of a safetensors file as views of its bytes: nothing is copied, or read before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pydantic
import pydantic_core

from jpets.errors import InvalidTask

LENGTH_BYTES = 8
METADATA = "__metadata__"
MOST_DIMENSIONS = 32
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "U8": np.dtype("u1"),
        "I8": np.dtype("i1"),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
    }
)
Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 63)]


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    dtype: str
    shape: Annotated[list[Count], pydantic.Field(max_length=MOST_DIMENSIONS)]
    data_offsets: tuple[Count, Count]


_ENTRIES = pydantic.TypeAdapter(dict[str, _Entry])
_TEXTS = pydantic.TypeAdapter(dict[str, str])


def view_tensors(data: bytes | memoryview) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """The metadata and the tensors by name, read-only and maybe not aligned. ``data`` has all of its header.

    Raises ``InvalidTask`` for what is no whole safetensors file, or has a dtype that tasks have not.
    """
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    try:
        header = pydantic_core.from_json(bytes(data[LENGTH_BYTES:start]))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
        metadata = _TEXTS.validate_python(header.pop(METADATA, {}), strict=True)
        entries = _ENTRIES.validate_python(header)
    except ValueError as error:
        raise InvalidTask("not a whole safetensors file: expected a header that describes its tensors") from error
    end, tensors = start, {}
    for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise InvalidTask(f"{name[:100]}: expected one of {sorted(DTYPES)}, found {entry.dtype[:20]}")
        count = math.prod(entry.shape)
        if (end, end + count * dtype.itemsize) != tuple(start + offset for offset in entry.data_offsets):
            raise InvalidTask(f"not a whole safetensors file: {name[:100]}: expected other offsets for its shape")
        if end + count * dtype.itemsize > len(data):
            break
        try:
            tensors[name] = np.frombuffer(data, dtype, count, end).reshape(entry.shape)
        except ValueError as error:  # empty, with sizes whose product is beyond 64 bits
            raise InvalidTask(f"{name[:100]}: expected a smaller shape") from error
        end += count * dtype.itemsize
    if end != len(data) or len(tensors) < len(entries):
        raise InvalidTask(f"not a whole safetensors file: expected {end} bytes as its header says, found {len(data)}")
    return metadata, tensors
