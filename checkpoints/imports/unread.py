"""A checkpoint's tensors while they are read: each is taken once, and what is left at the end was not understood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoints.canonical import FloatArray

FLOATS = ("float16", "float32", "float64", "bfloat16")


class Unread:
    """``problems`` collects what is wrong, so that all of it is said at once."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]], problems: list[str]) -> None:
        self._tensors = dict(tensors)
        self.problems = problems

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def take(self, name: str, shape: Sequence[int | None]) -> FloatArray:
        """A tensor in f32; ``None`` in ``shape`` is any size. One that is missing or of another shape is a problem, and
        zeros stand in for it, in no memory: the size that was expected may be any."""
        array = self._tensors.pop(name, None)
        expected = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
        if array is None:
            self.problems.append(f"{name}: expected {expected}, found nothing")
        elif array.dtype.name not in FLOATS:
            self.problems.append(f"{name}: expected floating-point numbers, found {array.dtype.name}")
        elif array.ndim != len(shape) or any(w not in (None, h) for w, h in zip(shape, array.shape, strict=True)):
            self.problems.append(f"{name}: expected {expected}, found {list(array.shape)}")
        else:
            return np.asarray(array, np.float32)
        return np.broadcast_to(np.float32(0), [size or 1 for size in shape])

    def drop(self, name: str) -> None:
        """For a tensor that is known to have no effect."""
        self._tensors.pop(name, None)

    def refuse_rest(self, why: str) -> None:
        """Makes a problem of every tensor that nobody took."""
        self.problems += [f"{name[:120]}: {why}" for name in self.names]
        self._tensors.clear()
