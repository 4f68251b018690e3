"""Task files with a part of them changed, and tasks compared number by number."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jpets.types import Task


def rebuild(data: bytes, tensors: dict[str, Any] | None = None, **document: Any) -> bytes:
    """The file with tensors replaced (None: removed) and top-level fields of its document replaced (None: removed)."""
    new = {name: value for name, value in {**document_of(data), **document}.items() if value is not None}
    found = {**safetensors.numpy.load(data), **(tensors or {})}
    kept = {name: array for name, array in found.items() if array is not None}
    return safetensors.numpy.save(kept, metadata={"jpets": json.dumps(new)})


def document_of(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["jpets"])
    return found


def same(left: Task, right: Task) -> bool:
    pairs = [(left.head.tensors, right.head.tensors)]
    pairs += [(a.tensors, b.tensors) for a, b in zip(left.deltas, right.deltas, strict=True)]
    equal = all(a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a) for a, b in pairs)

    def plain(task: Task) -> dict[str, Any]:
        deltas = tuple(dataclasses.replace(delta, tensors={}) for delta in task.deltas)
        head = dataclasses.replace(task.head, tensors={})
        return dataclasses.asdict(dataclasses.replace(task, deltas=deltas, head=head))

    return equal and plain(left) == plain(right)
