from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.task_file import read_task, task_to_bytes
from jpets.config import BackboneConfig
from jpets.deltas import METHODS
from jpets.errors import InvalidTask
from jpets.types import Task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["query", "lora"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SPOTS = st.sampled_from(
    [
        ("format",),
        ("backbone",),
        ("backbone", "name"),
        ("backbone", "fingerprint"),
        ("backbone", "layers"),
        ("deltas",),
        ("deltas", 0),
        ("deltas", 0, "method"),
        ("deltas", 0, "sites"),
        ("deltas", 0, "layers"),
        ("deltas", 0, "ranks"),
        ("deltas", 0, "ranks", "query"),
        ("deltas", 1, "bias_sites"),
        ("deltas", 1, "sites"),
        ("deltas", 2, "bottleneck"),
        ("deltas", 2, "activation"),
        ("deltas", 2, "input"),
        ("deltas", 2, "sites"),
        ("head",),
        ("head", "type"),
        ("head", "activation"),
        ("labels",),
        ("labels", 0),
        ("preprocessing",),
        ("preprocessing", "max_length"),
        ("preprocessing", "template"),
        ("preprocessing", "thresholds"),
        ("created",),
    ]
)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parts_of(data: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """A task file's metadata and tensors."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"], dict(safetensors.numpy.load(data))


@pytest.fixture(scope="module")
def sample(make_task: Callable[..., Task]) -> bytes:
    return task_to_bytes(make_task("lora", "diff", "adapter"))


@FUZZ
@given(spot=SPOTS, value=JSON)
def test_any_document_is_read_or_refused(
    sample: bytes, config: BackboneConfig, spot: tuple[Any, ...], value: Any
) -> None:
    metadata, tensors = parts_of(sample)
    document = json.loads(metadata["jpets"])
    parent = document
    for key in spot[:-1]:
        parent = parent[key]
    parent[spot[-1]] = value
    data = safetensors.numpy.save(tensors, metadata={"jpets": json.dumps(document)})
    try:
        task = read_task(data, id="sample", config=config)
    except InvalidTask as error:
        assert len(error.message) < 6000
    else:
        for delta in task.deltas:
            METHODS[delta.method].lower(delta, config)


@FUZZ
@given(data=st.data())
def test_any_damage_is_read_or_refused(sample: bytes, config: BackboneConfig, data: st.DataObject) -> None:
    header = 8 + int.from_bytes(sample[:8], "little")
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    try:
        read_task(bytes(damaged[:cut]), id="sample", config=config)
    except InvalidTask as error:
        assert len(error.message) < 6000


@FUZZ
@given(data=st.data())
def test_any_indices_are_read_or_refused(sample: bytes, config: BackboneConfig, data: st.DataObject) -> None:
    parts = data.draw(
        st.lists(st.sampled_from(["rows", "cols", "layer_offsets", "bias_cols", "bias_offsets"]), max_size=3)
    )
    metadata, tensors = parts_of(sample)
    for part in parts:
        dtype: Any = data.draw(
            st.sampled_from([np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.int8, np.int16])
        )
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        values = data.draw(st.lists(st.integers(0, 40) | st.integers(low, high), max_size=4))
        tensors[f"delta/1/diff/query/{part}"] = np.array(values, dtype)
    try:
        task = read_task(safetensors.numpy.save(tensors, metadata=metadata), id="sample", config=config)
    except InvalidTask as error:
        assert len(error.message) < 6000
    else:
        METHODS["diff"].lower(task.deltas[1], config)
