"""How the arrays of a batch are passed to a program: those of one dtype as one buffer.

Every array that is passed costs a program's call some microseconds on the host, and a transfer to a device that has
memory of its own. A batch has thirty arrays and more, almost all of them of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from jpets.deltas.view import ClassView
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.rows import TokenInput
from jpets.engine.batch.views import blank_view, blanks
from jpets.model.batch import PackedBatch, Rows
from pallas_kernels.packed_attention import AttentionGroup

Buffers = tuple[npt.NDArray[Any], ...]
A = TypeVar("A")


class Part(NamedTuple):
    """An array in a buffer."""

    buffer: int
    first: int
    end: int
    shape: tuple[int, ...]


class Parts(NamedTuple):
    """What a program's buffers consist of."""

    batch: PackedBatch
    views: tuple[ClassView, ...]
    below: PackedBatch | None
    """The batch of the trunk."""


PLACES = {"ids": TokenInput()}
"""The inputs of rows above a trunk."""


class BatchArguments:
    """For one bucket and variant, and a network's ``inputs``. ``dtypes`` are those of the buffers, in order.

    Where rows share a ``trunk``, in its bucket, that has the inputs, and their own ``ids`` are places of its tokens.

    Every batch has buffers of its own. A CPU's programs may read a buffer where the host wrote it, so it could only be
    written again after its program has ended, and a dispatch does not wait for that. Donating a buffer would save
    nothing: no output has its shape.
    """

    def __init__(
        self, bucket: Bucket, variant: Variant, inputs: Mapping[str, TokenInput], trunk: Bucket | None = None
    ) -> None:
        self.bucket = bucket
        self.variant = variant
        views = tuple(blank_view(bucket, key, variant) for key in variant.classes())
        below = _blank_batch(trunk, inputs) if trunk is not None else None
        tree: Any
        leaves, tree = jax.tree.flatten((_blank_batch(bucket, PLACES if trunk is not None else inputs), views, below))
        self._tree = tree
        self.dtypes = tuple(sorted({leaf.dtype for leaf in leaves}, key=str))
        self._parts: list[Part] = []
        sizes = [0] * len(self.dtypes)
        for leaf in leaves:
            buffer = self.dtypes.index(leaf.dtype)
            first, sizes[buffer] = sizes[buffer], sizes[buffer] + leaf.size
            self._parts.append(Part(buffer, first, sizes[buffer], leaf.shape))
        own = [[leaf.ravel() for leaf in leaves if leaf.dtype == dtype] for dtype in self.dtypes]
        self._blank: Buffers = tuple(map(np.concatenate, own))

    @property
    def sizes(self) -> Sequence[int]:
        """The lengths of the buffers."""
        return [len(buffer) for buffer in self._blank]

    def blank(self) -> tuple[Buffers, Parts]:
        """New buffers of a batch without rows, and what they consist of."""
        buffers = tuple(buffer.copy() for buffer in self._blank)
        return buffers, self._cut(buffers, lambda buffer, part: buffer[part.first : part.end])

    def unpacked(self, buffers: Sequence[jax.Array]) -> Parts:
        """What they consist of inside a program."""
        return self._cut(buffers, lambda buffer, part: jax.lax.slice(buffer, (part.first,), (part.end,)))

    def _cut(self, buffers: Sequence[A], take: Callable[[A, Part], Any]) -> Parts:
        leaves = [take(buffers[part.buffer], part).reshape(part.shape) for part in self._parts]
        return Parts(*self._tree.unflatten(leaves))


def _blank_batch(bucket: Bucket, inputs: Mapping[str, TokenInput]) -> PackedBatch:
    t, n, packed = bucket.tokens, bucket.rows, not bucket.rectangular
    given: Any = {name: np.full((t, *own.shape), own.fill, own.dtype) for name, own in inputs.items()}
    groups = tuple(AttentionGroup(blanks(*group) if packed else None, blanks(group[0])) for group in bucket.groups)
    cells, row_of_token = (blanks(t) if packed else None for _ in range(2))
    return PackedBatch(given, blanks(t), groups, cells, row_of_token, Rows(blanks(n, of=t), blanks(n)))
