"""Views of a safetensors file: the tensors that the library reads, and the files that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from checkpoints.tensor_views import view_tensors
from jpets.errors import InvalidTask

TENSORS: dict[str, np.ndarray] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.uint8),
    "empty": np.zeros((0, 4), np.float16),
    "scalar": np.array(7, np.int64),
}
FILE = safetensors.numpy.save(TENSORS, metadata={"key": "value"})
END = 8 + int.from_bytes(FILE[:8], "little")
Header = dict[str, Any]


def with_header(change: Callable[[Header], object]) -> bytes:
    header = json.loads(FILE[8:END])
    change(header)
    return with_text(json.dumps(header).encode())


def with_text(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + FILE[END:]


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_tensors_are_what_the_library_reads(kind: Callable[[bytes], bytes | memoryview]) -> None:
    metadata, found = view_tensors(kind(FILE))
    assert metadata == {"key": "value"}
    assert found.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert found[name].dtype == array.dtype and not found[name].flags.owndata
        np.testing.assert_array_equal(found[name], array)


WRONG: dict[str, bytes] = {
    "cut off": FILE[:-1],
    "longer": FILE + b"x",
    "no JSON": with_text(b"{]"),
    "a list": with_text(b"[]"),
    "deep": with_text(b'{"a":' * 5000),
    "other metadata": with_header(lambda header: header.update(__metadata__={"key": 1})),
    "no offsets": with_header(lambda header: header["a"].pop("data_offsets")),
    "overlap": with_header(lambda header: header["b"].update(data_offsets=header["a"]["data_offsets"])),
    "hole": with_header(lambda header: header.pop("scalar")),
    "negative": with_header(lambda header: header["a"].update(shape=[-2, -3])),
    "other shape": with_header(lambda header: header["a"].update(shape=[2, 4])),
    "wide shape": with_header(lambda header: header["a"].update(shape=[1 << 40, 1 << 40])),
    "wider shape": with_header(lambda header: header["a"].update(shape=[1 << 62] * 30)),
    "beyond 64 bits": with_header(lambda header: header["a"].update(shape=[10**30])),
    "backwards": with_header(lambda header: header["a"].update(data_offsets=header["a"]["data_offsets"][::-1])),
    "far offsets": with_header(lambda header: header["a"].update(data_offsets=[1 << 62, (1 << 62) + 24])),
    "no such dtype": with_header(lambda header: header["a"].update(dtype="F33")),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_the_library_refuses_are_refused(name: str) -> None:
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load(WRONG[name])
    with pytest.raises(InvalidTask):
        view_tensors(memoryview(WRONG[name]))


def test_many_dimensions_are_refused() -> None:
    with pytest.raises(InvalidTask):
        view_tensors(with_header(lambda header: header["a"].update(shape=[6] + [1] * 100)))


def test_an_empty_tensor_of_impossible_shape_is_refused() -> None:
    with pytest.raises(InvalidTask):
        view_tensors(with_header(lambda header: header["empty"].update(shape=[0, 1 << 62, 1 << 62])))
