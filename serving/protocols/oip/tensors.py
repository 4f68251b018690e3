"""Tensors of the Open Inference Protocol, and their raw bytes: those of the binary extension over HTTP, and gRPC's."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jpets.errors import InvalidInput

Ints: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]
LENGTH = struct.Struct("<I")
"""Stands before each text of raw bytes."""
NUMBERS = {"f": ("FP32", "<f4"), "i": ("INT64", "<i8")}
"""Datatype and raw form by numpy's kind; all other arrays are texts."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input as it came. ``data`` is flat in row-major order, or nested as ``shape`` says, or raw bytes; a text may
    be in UTF-8."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | memoryview

    @property
    def values(self) -> int:
        """How many values came, at least: of nested ones as many as the shape says, which is compared with them later.
        A shape of more sizes is refused unread."""
        if isinstance(self.data, memoryview):
            return len(self.data) // (1 if self.datatype == "BYTES" else np.dtype(np.int64).itemsize)
        return max(len(self.data), math.prod(self.shape) if len(self.shape) <= 2 else 0)


def datatype_of(array: Array) -> str:
    return NUMBERS[array.dtype.kind][0] if array.dtype.kind in NUMBERS else "BYTES"


def raw_of(array: Array) -> bytes:
    """An output's raw bytes: little-endian, row-major, each text behind its length."""
    if array.dtype.kind in NUMBERS:
        return np.ascontiguousarray(array, NUMBERS[array.dtype.kind][1]).tobytes()
    texts = [str(value).encode() for value in array.ravel().tolist()]
    return b"".join(part for text in texts for part in (LENGTH.pack(len(text)), text))


def raw_ints(name: str, raw: memoryview, expected: int) -> Ints:
    """Raises ``InvalidInput`` for another number of values than expected."""
    if len(raw) != 8 * expected:
        raise InvalidInput(f"{name}: the shape needs {8 * expected} bytes, found {len(raw)}")
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)


def raw_texts(name: str, raw: memoryview, expected: int) -> list[bytes]:
    """Raises ``InvalidInput`` for another number of texts than expected, or one that ends behind the bytes."""
    found: list[bytes] = []
    at = 0
    while at < len(raw) and len(found) <= expected:
        behind = at + LENGTH.size
        (length,) = LENGTH.unpack_from(raw, at) if behind <= len(raw) else (len(raw),)
        if behind + length > len(raw):
            raise InvalidInput(
                f"{name}: expected each text behind its length in four bytes; text {len(found)} ends behind the tensor"
            )
        found.append(bytes(raw[behind : behind + length]))
        at = behind + length
    if len(found) != expected:
        more = " or more" if len(found) > expected else ""
        raise InvalidInput(f"{name}: the shape needs {expected} texts, found {len(found)}{more}")
    return found
