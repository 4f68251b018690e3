"""Task files for benchmarks of engines: these may run where the packages that check real ones are missing."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors.numpy
from safetensors import safe_open

from jpets.types import BackboneRef, Delta, Head, Task


def write_task(task: Task, path: pathlib.Path) -> None:
    """Floats in bf16. Only single-label heads."""
    tensors = {
        f"{number}/{name}": array for number, delta in enumerate(task.deltas) for name, array in delta.tensors.items()
    }
    tensors |= {f"head/{name}": array for name, array in task.head.tensors.items()}
    document = {
        "backbone": dataclasses.asdict(task.backbone),
        "deltas": [[delta.method, dict(delta.settings)] for delta in task.deltas],
        "labels": task.labels,
    }
    stored = {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype.kind == "f" else array for name, array in tensors.items()
    }
    safetensors.numpy.save_file(stored, path, metadata={"task": json.dumps(document)})


def read_task(path: pathlib.Path) -> Task:
    with safe_open(path, "np") as file:
        document = json.loads(file.metadata()["task"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    arrays = {name: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for name, a in tensors.items()}

    def part(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    deltas = tuple(
        Delta(method, settings, part(f"{number}/")) for number, (method, settings) in enumerate(document["deltas"])
    )
    head = Head("sequence-classification", part("head/"))
    return Task(path.stem, BackboneRef(**document["backbone"]), deltas, head, tuple(document["labels"]))
