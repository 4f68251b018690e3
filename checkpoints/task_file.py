"""The task file: one safetensors file with a task's deltas, head and settings.

Tensors are named ``delta/<i>/<method>/<site>/<name>`` and ``head/<name>``; the metadata key ``jpets`` holds the rest as
JSON (``task_document``). Nothing in a file is used before it has been checked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pydantic
import safetensors.numpy

from checkpoints.ids import check_id
from checkpoints.task_document import TaskDocument
from checkpoints.tensor_views import LENGTH_BYTES, view_tensors
from checkpoints.validation import refuse, validate_structure, validate_values
from jpets.config import BackboneConfig
from jpets.deltas import method_named
from jpets.errors import InvalidTask
from jpets.files import write_atomic
from jpets.kinds import FloatDType
from jpets.types import BackboneRef, Task, Tensors

METADATA = "jpets"


@dataclasses.dataclass(frozen=True)
class TaskLimits:
    """Sizes beyond which a file is refused unread."""

    header_bytes: int = 1 << 20
    file_bytes: int = 512 << 20


LIMITS = TaskLimits()


class _Header(pydantic.BaseModel):
    metadata: dict[str, str] = pydantic.Field(alias="__metadata__")


def read_task(
    source: Path | str | bytes | memoryview,
    *,
    id: str | None = None,
    config: BackboneConfig | None = None,
    backbone: BackboneRef | str | None = None,
    limits: TaskLimits = LIMITS,
) -> Task:
    """A checked task from a file's path or bytes; floats become f32. ``id`` is the file's stem by default.

    ``config`` and ``backbone`` (reference or fingerprint) say what it must fit; see ``validation.validate``.
    Raises ``InvalidTask``; ``FileNotFoundError`` for a path that is not there.
    """
    if id is None:
        if isinstance(source, bytes | memoryview):
            raise InvalidTask("a task read from bytes needs an id")
        id = Path(source).stem
    check_id(id)
    data = source if isinstance(source, bytes | memoryview) else read_bytes(Path(source), limits)
    document, tensors = _parse(data, limits)
    methods = [method_named(part.method).name for part in document.deltas]
    prefixes = [f"delta/{index}/{method}/" for index, method in enumerate(methods)]
    groups = {prefix: _strip(tensors, prefix) for prefix in (*prefixes, "head/")}
    others = [name for name in sorted(tensors) if not name.startswith((*prefixes, "head/"))]
    refuse([f"unexpected tensor {name[:100]!r}; this file has deltas {methods} and a head" for name in others])
    task = document.task(id, [groups[prefix] for prefix in prefixes], groups["head/"])
    validate_structure(task, config, backbone)
    task = _with_tensors(task, _as_single)
    validate_values(task, config)
    return _with_tensors(task, _own)


def task_to_bytes(task: Task, float_dtype: FloatDType = "float32") -> bytes:
    """The task file's bytes; of ``float_dtype`` are the deltas' numbers. A head keeps its own: they are few, and a
    bias may be a value like 1995, which bfloat16 has not. Raises ``InvalidTask`` for a task that could not be read
    back."""
    stored: dict[str, npt.NDArray[Any]] = {}
    for index, delta in enumerate(task.deltas):
        prefix = f"delta/{index}/{delta.method}/"
        stored |= {prefix + name: _as_stored(array, float_dtype) for name, array in delta.tensors.items()}
    stored |= {f"head/{name}": _as_stored(array, "float32") for name, array in task.head.tensors.items()}
    document = TaskDocument.of_task(task)
    data: bytes = safetensors.numpy.save(stored, metadata={METADATA: document.to_json()})
    read_task(data, id=task.id)
    return data


def write_task(task: Task, path: Path | str, float_dtype: FloatDType = "float32") -> None:
    """Writes the task file whole or not at all. Raises ``InvalidTask``, ``OutOfSpace``."""
    write_atomic(Path(path), task_to_bytes(task, float_dtype))


def read_bytes(path: Path, limits: TaskLimits = LIMITS) -> bytes:
    """A task file's bytes; sizes are checked before anything is allocated. Raises ``InvalidTask``."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH_BYTES)
        _check_sizes(start, size, limits)
        file.seek(0)
        return file.read()


def fingerprint_of(path: Path, limits: TaskLimits = LIMITS) -> str | None:
    """Which backbone a task file says that it is for; None for what is no task file, as ``read_task`` will say."""
    try:
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            _check_sizes(start, os.fstat(file.fileno()).st_size, limits)
            header = file.read(int.from_bytes(start, "little"))
        metadata = _Header.model_validate_json(header).metadata
        return TaskDocument.parse(metadata.get(METADATA, "")).backbone.fingerprint
    except (InvalidTask, pydantic.ValidationError):
        return None


def _check_sizes(start: bytes, size: int, limits: TaskLimits) -> None:
    if size > limits.file_bytes:
        raise InvalidTask(f"a task file may have {limits.file_bytes} bytes, found {size}")
    if len(start) < LENGTH_BYTES:
        raise InvalidTask(f"not a safetensors file: expected at least {LENGTH_BYTES} bytes, found {size}")
    header = int.from_bytes(start[:LENGTH_BYTES], "little")
    if header > limits.header_bytes:
        raise InvalidTask(f"a task file's header may have {limits.header_bytes} bytes, found {header}")
    if LENGTH_BYTES + header > size:
        raise InvalidTask(f"the file is cut off: its header needs {LENGTH_BYTES + header} bytes, found {size}")


def _parse(data: bytes | memoryview, limits: TaskLimits) -> tuple[TaskDocument, dict[str, npt.NDArray[Any]]]:
    _check_sizes(bytes(data[:LENGTH_BYTES]), len(data), limits)
    metadata, tensors = view_tensors(data)
    if METADATA not in metadata:
        raise InvalidTask(f"not a task file: expected the metadata key {METADATA!r}, found {len(metadata)} others")
    document = TaskDocument.parse(metadata[METADATA])
    return document, {name: _as_read(name, array) for name, array in tensors.items()}


def _as_read(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Indices as uint16 or int32, whatever width they came in; bytes and floats as they are."""
    dtype = array.dtype
    if dtype.kind not in "ui" or dtype.name == "uint8":
        return array
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < 0 or high > np.iinfo(np.int32).max:
        raise InvalidTask(f"{name[:100]}: expected numbers from 0 to {np.iinfo(np.int32).max}, found {low} to {high}")
    return array.astype(np.uint16 if dtype.itemsize <= 2 else np.int32, copy=False)


def _as_single(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array if array.dtype.kind in "ui" else array.astype(np.float32, copy=False)


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """No view of a file's bytes, which would keep all of it and may lie unaligned."""
    return array if array.flags.owndata else array.copy()


def _with_tensors(task: Task, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Task:
    def changed(tensors: Tensors) -> Tensors:
        return {name: change(array) for name, array in tensors.items()}

    deltas = tuple(dataclasses.replace(delta, tensors=changed(delta.tensors)) for delta in task.deltas)
    return dataclasses.replace(
        task, deltas=deltas, head=dataclasses.replace(task.head, tensors=changed(task.head.tensors))
    )


def _as_stored(array: npt.NDArray[Any], float_dtype: FloatDType) -> npt.NDArray[Any]:
    dtype = np.dtype(ml_dtypes.bfloat16 if float_dtype == "bfloat16" else float_dtype)
    array = np.asarray(array)
    if array.dtype.kind not in "uib":
        with np.errstate(over="ignore"):  # what does not fit becomes Inf, which reading back refuses
            array = array.astype(dtype)
    return np.ascontiguousarray(array)


def _strip(tensors: Tensors, prefix: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}
