"""A checkpoint's tensors while they are read: each is taken once, and what is left at the end was not understood."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoints.canonical import FloatArray
from checkpoints.listing import listing
from jpets.errors import InvalidTask

FLOATS = ("float16", "float32", "float64", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Problems:
    """Problems of a checkpoint, collected so that all are told at once; options first, as one can spoil every tensor.
    Of many tensors with one fault the first few are named, and how many there are.
    """

    options: list[str] = dataclasses.field(default_factory=list)
    tensors: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.options or self.tensors)

    def refuse(self) -> None:
        """Raises ``InvalidTask``, unless there are none."""
        if self:
            raise InvalidTask(listing([*self.options, *self.tensors]))


class Unread:
    """What is wrong goes to ``problems``."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]], problems: Problems) -> None:
        self._tensors = dict(tensors)
        self.problems = problems

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def take(self, name: str, shape: Sequence[int | None]) -> FloatArray:
        """A tensor in f32; ``None`` in ``shape`` is any size from 1 on. A tensor that is missing, of another shape or
        not finite is a problem. Without one of the right shape, zeros that take no memory stand in: the expected size
        may be huge. Where any size was expected, theirs is 0."""
        array, wrong = self._tensors.pop(name, None), self.problems.tensors
        expected = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
        if array is None:
            wrong.append(f"{name}: expected {expected}, found nothing")
        elif array.dtype.name not in FLOATS:
            wrong.append(f"{name}: expected floating-point numbers, found {array.dtype.name}")
        elif not _fits(array.shape, shape):
            wrong.append(f"{name}: expected {expected}, found {list(array.shape)}")
        else:
            found = np.asarray(array, np.float32)
            if not np.isfinite(found).all():
                wrong.append(f"{name}: expected finite numbers, found {'NaN' if np.isnan(found).any() else 'Inf'}")
            return found
        return np.broadcast_to(np.float32(0), [size or 0 for size in shape])

    def drop(self, name: str) -> None:
        """Drops a tensor that is known to have no effect."""
        self._tensors.pop(name, None)

    def refuse_rest(self, why: str) -> None:
        """Makes a problem of every tensor that was not taken."""
        self.problems.tensors.extend(f"{name[:120]}: {why}" for name in self.names)
        self._tensors.clear()


def _fits(found: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(found) == len(expected) and all(
        have == want if want is not None else have > 0 for have, want in zip(found, expected, strict=True)
    )
