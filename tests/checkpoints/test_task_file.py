from __future__ import annotations

import dataclasses
import json
import mmap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from task_files import document_of, rebuild, same

from checkpoints.task_file import TaskLimits, read_task, task_to_bytes, write_task
from checkpoints.validation import HEAD_ACTIVATIONS, validate
from jpets.config import BackboneConfig
from jpets.deltas import METHODS
from jpets.errors import InvalidTask
from jpets.types import BackboneRef, Head, Preprocessing, Task
from pallas_kernels import numerics

MakeTask = Callable[..., Task]
OTHER = "sha256:" + "f" * 64
ALL = ("adapter", "lora", "bitfit", "mask", "diff", "ia3", "onebit", "prefix", "prompt")


def test_every_method_is_tested() -> None:
    assert set(METHODS) == set(ALL)


@pytest.mark.parametrize("methods", [*((name,) for name in ALL), ALL, ("lora", "lora"), ()])
def test_round_trip(make_task: MakeTask, config: BackboneConfig, tmp_path: Path, methods: tuple[str, ...]) -> None:
    preprocessing = Preprocessing(max_length=20, truncation=True, template="{text} or {text_pair}?", prefix="query: ")
    task = make_task(*methods, preprocessing=preprocessing, license="MIT", description="für Tests")
    write_task(task, tmp_path / "sample.safetensors")
    again = read_task(tmp_path / "sample.safetensors", config=config, backbone=task.backbone)
    assert same(again, task)
    assert [path.name for path in tmp_path.iterdir()] == ["sample.safetensors"]
    for delta in again.deltas:
        METHODS[delta.method].lower(delta, config)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(make_task: MakeTask, config: BackboneConfig, dtype: Any) -> None:
    task = make_task("lora", "diff")
    data = task_to_bytes(task, dtype)
    assert len(data) < len(task_to_bytes(task))
    again = read_task(data, id="sample", config=config)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for name, array in task.deltas[0].tensors.items():
        assert again.deltas[0].tensors[name].dtype == np.float32
        np.testing.assert_array_equal(again.deltas[0].tensors[name], array.astype(kind).astype(np.float32))
    assert again.deltas[1].tensors["query/rows"].dtype == np.uint16


def test_values_too_large_for_the_stored_format(make_task: MakeTask) -> None:
    task = make_task("bitfit")
    (delta,) = task.deltas
    large = {name: np.full_like(array, 1e9) for name, array in delta.tensors.items()}
    with pytest.raises(InvalidTask, match="expected finite numbers, found Inf"):
        task_to_bytes(dataclasses.replace(task, deltas=(dataclasses.replace(delta, tensors=large),)), "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_head_keeps_its_numbers(make_task: MakeTask, config: BackboneConfig, dtype: Any) -> None:
    """A value's bias is about the mean of the values."""
    head = Head(
        "sequence-classification",
        {"kernel": np.full((16, 1), 1e-4, np.float32), "bias": np.array([1995.3], np.float32)},
        problem="regression",
    )
    again = read_task(task_to_bytes(make_task("lora", head=head, labels=()), dtype), id="years", config=config)
    assert again.head.tensors["bias"] == np.float32(1995.3)
    np.testing.assert_array_equal(again.head.tensors["kernel"], head.tensors["kernel"])


def test_wide_indices_are_narrowed(make_task: MakeTask, config: BackboneConfig) -> None:
    task = make_task("diff")
    data = task_to_bytes(task)
    wide = {n: a.astype(np.int64) for n, a in safetensors.numpy.load(data).items() if a.dtype.kind in "iu"}
    small = {n: a.astype(np.uint8) for n, a in wide.items() if "cols" in n or "rows" in n}
    again = read_task(rebuild(data, wide), id="sample", config=config)
    assert again.deltas[0].tensors["query/cols"].dtype == np.int32
    METHODS["diff"].lower(again.deltas[0], config)
    with pytest.raises(InvalidTask, match="expected uint16 or int32"):
        read_task(rebuild(data, small), id="sample", config=config)


def test_head_activations_are_ones_that_heads_compute() -> None:
    assert set(HEAD_ACTIVATIONS) == set(numerics.ACTIVATIONS)


# --- files that are not whole task files ---


def test_truncated(make_task: MakeTask, tmp_path: Path) -> None:
    data = task_to_bytes(make_task("lora"))
    path = tmp_path / "sample.safetensors"
    for size in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        for source in (path, data[:size]):
            with pytest.raises(InvalidTask):
                read_task(source, id="sample")


def test_large_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sample.safetensors"
    with path.open("wb") as file:
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate(101 << 20)
    with pytest.raises(InvalidTask, match="header may have 1048576 bytes, found 104857600"):
        read_task(path)
    with pytest.raises(InvalidTask, match="header may have 1048576 bytes, found 18446744073709551615"):
        read_task(b"\xff" * 100, id="sample")


def test_large_file_is_refused_unread(make_task: MakeTask) -> None:
    with pytest.raises(InvalidTask, match="may have 1000 bytes"):
        read_task(task_to_bytes(make_task("lora")), id="sample", limits=TaskLimits(file_bytes=1000))


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"other": "{}"}, {"jpets": ""}, {"jpets": "[]"}, {"jpets": "{"}, {"jpets": "[" * 100000}],
)
def test_no_document(metadata: dict[str, str] | None) -> None:
    with pytest.raises(InvalidTask):
        read_task(safetensors.numpy.save({"x": np.zeros(1, np.float32)}, metadata=metadata), id="sample")


@pytest.mark.parametrize("id", ["", "A", "a b", "../x", "a/b", "a\0", "x" * 300, "-a", "\n", "a\n"])
def test_bad_ids(make_task: MakeTask, id: str) -> None:
    with pytest.raises(InvalidTask, match="must be 1 to 128") as caught:
        read_task(task_to_bytes(make_task("bitfit")), id=id)
    assert "/" not in caught.value.message
    with pytest.raises(InvalidTask, match="needs an id"):
        read_task(b"")


# --- tensors ---


def test_other_backbone(make_task: MakeTask, config: BackboneConfig) -> None:
    task = make_task("lora")
    with pytest.raises(InvalidTask, match=f"with fingerprint {task.backbone.fingerprint}, expected {OTHER}"):
        read_task(task_to_bytes(task), id="sample", config=config, backbone=OTHER)
    other = BackboneRef("other", OTHER, "bert", 16, 2)
    with pytest.raises(InvalidTask, match=f"expected {OTHER}"):
        read_task(task_to_bytes(task), id="sample", backbone=other)
    with pytest.raises(InvalidTask, match=r"backbone\.layers: expected 3, found 2"):
        read_task(task_to_bytes(task), id="sample", config=dataclasses.replace(config, layers=3))
    with pytest.raises(InvalidTask, match="fingerprint must be sha256"):
        task_to_bytes(dataclasses.replace(task, backbone=dataclasses.replace(task.backbone, fingerprint="x")))


def test_missing_extra_and_misshapen_tensors_are_all_named(make_task: MakeTask, config: BackboneConfig) -> None:
    changed = {
        "delta/0/lora/query/A": None,
        "delta/0/lora/query/C": np.zeros(2, np.float32),
        "delta/0/lora/key/B": np.zeros((2, 2, 15), np.float32),
        "delta/0/lora/value/A": np.zeros((2, 16, 2), np.int32),
        "head/bias": np.zeros(4, np.float32),
    }
    with pytest.raises(InvalidTask) as caught:
        read_task(rebuild(task_to_bytes(make_task("lora")), changed), id="sample", config=config)
    for line in (
        "delta/0/lora/query/A: expected [2, 16, 2], found nothing",
        "delta/0/lora/query/C: unexpected tensor [2]",
        "delta/0/lora/key/B: expected [2, 2, 16], found [2, 2, 15]",
        "delta/0/lora/value/A: expected float32 or float16 or bfloat16, found int32",
        "head/bias: expected [3], found [4]",
    ):
        assert line in caught.value.message


@pytest.mark.parametrize("name", ["delta/1/lora/query/A", "delta/0/bitfit/query/bias", "delta", "elsewhere"])
def test_tensors_of_no_delta(make_task: MakeTask, name: str) -> None:
    data = rebuild(task_to_bytes(make_task("lora")), {name: np.zeros(1, np.float32)})
    with pytest.raises(InvalidTask, match=f"unexpected tensor '{name}'"):
        read_task(data, id="sample")


@pytest.mark.parametrize(("value", "found"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "Inf")])
@pytest.mark.parametrize("name", ["delta/0/lora/query/A", "head/kernel"])
def test_not_finite(make_task: MakeTask, name: str, value: float, found: str) -> None:
    data = task_to_bytes(make_task("lora"))
    array = safetensors.numpy.load(data)[name].copy()
    array.flat[3] = value
    with pytest.raises(InvalidTask, match=f"{name}: expected finite numbers, found {found}"):
        read_task(rebuild(data, {name: array}), id="sample")


@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.complex64])
def test_other_number_formats(make_task: MakeTask, dtype: Any) -> None:
    data = rebuild(task_to_bytes(make_task("lora")), {"head/bias": np.zeros(3, dtype)})
    with pytest.raises(InvalidTask):
        read_task(data, id="sample")


def test_indices_out_of_range(make_task: MakeTask, config: BackboneConfig) -> None:
    task = make_task("diff")
    data = task_to_bytes(task)
    rows = task.deltas[0].tensors["query/rows"].astype(np.int32)
    for bad, message in ((-1, "from 0 to"), (16, r"rows must lie in 0\.\.15"), (1 << 40, "from 0 to")):
        changed = rows.astype(np.int64)
        changed[0] = bad
        with pytest.raises(InvalidTask, match=message):
            read_task(rebuild(data, {"delta/0/diff/query/rows": changed}), id="sample", config=config)
    negative = {**task.deltas[0].tensors, "query/rows": rows - 100}
    with pytest.raises(InvalidTask, match="query/rows: expected numbers from 0"):
        validate(dataclasses.replace(task, deltas=(dataclasses.replace(task.deltas[0], tensors=negative),)), config)
    dense = METHODS["diff"].init(np.random.default_rng(0), {"density": 0.1}, config, 0.02)
    unsorted = {**dense.tensors, "query/cols": dense.tensors["query/cols"][::-1].copy()}
    with pytest.raises(InvalidTask, match="must be sorted"):
        validate(dataclasses.replace(task, deltas=(dataclasses.replace(dense, tensors=unsorted),)), config)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("wrong", ["head/kernel", "backbone", "labels"])
def test_large_files_are_refused_without_a_copy(
    make_task: MakeTask, config: BackboneConfig, tmp_path: Path, dtype: str, wrong: str
) -> None:
    """They are refused where their descriptions say that they do not fit."""
    task, size, count = make_task("lora"), 2 if "16" in dtype else 4, 16 << 20
    document = document_of(task_to_bytes(task))
    name = wrong if wrong == "head/kernel" else "head/bias"
    fingerprint = OTHER if wrong == "backbone" else task.backbone.fingerprint
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, count * size]}
    header = json.dumps({"__metadata__": {"jpets": json.dumps(document)}, name: entry}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as written:
        written.write(len(header).to_bytes(8, "little") + header)
        written.truncate(written.tell() + count * size)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tracemalloc.start()
        with pytest.raises(InvalidTask), memoryview(data) as view:
            read_task(view, id="sample", config=config, backbone=fingerprint)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < count


def test_a_task_keeps_nothing_of_its_file(make_task: MakeTask, config: BackboneConfig) -> None:
    task = read_task(memoryview(task_to_bytes(make_task("lora", "diff"))), id="sample", config=config)
    for tensors in (task.head.tensors, *(delta.tensors for delta in task.deltas)):
        assert all(array.flags.owndata and array.flags.aligned for array in tensors.values())
