from __future__ import annotations

import collections
import io
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints.huggingface import read_backbone
from checkpoints.torch_file import read_torch
from jpets.errors import InvalidBackbone

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


class _Global:
    """Pickled as the name of something in torch, which need not be installed."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Makes pickle accept it as a function."""


class _Storage:
    def __init__(self, key: str, array: np.ndarray) -> None:
        self.key, self.array = key, array


class _Tensor:
    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> None:
        self.arguments: tuple[Any, ...] = (storage, offset, size, stride, False, collections.OrderedDict(), *more)


PythonPickler: Any = vars(pickle)["_Pickler"]
"""The pickler written in Python lets a class say how a global is written."""


class _Pickler(PythonPickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            name = STORAGES[obj.array.dtype.name]
            return ("storage", _Global("torch", name), obj.key, "cpu", obj.array.size)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Tensor):
            return _Global("torch._utils", "_rebuild_tensor_v2"), obj.arguments
        return NotImplemented

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        else:
            super().save(obj, save_persistent_id)


def write_torch(path: Path, state: Any, arrays: list[np.ndarray], compression: int = zipfile.ZIP_STORED) -> Path:
    """A zip archive as ``torch.save`` writes."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(state)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(arrays):
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return path


def whole(key: int, array: np.ndarray) -> _Tensor:
    stride = tuple(step // array.itemsize for step in array.strides)
    return _Tensor(_Storage(str(key), array), 0, array.shape, stride)


def test_values_views_and_types(tmp_path: Path) -> None:
    arrays = [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.arange(3, dtype=np.float16),
        np.arange(5),
    ]
    state: Any = collections.OrderedDict((f"t{key}", whole(key, array)) for key, array in enumerate(arrays))
    state["transposed"] = _Tensor(_Storage("0", arrays[0]), 1, (4, 2), (1, 4))
    state["empty"] = _Tensor(_Storage("0", arrays[0]), 0, (0, 4), (4, 1))
    state["_metadata"] = state._metadata = {"": {"version": 1}}
    found = read_torch(write_torch(tmp_path / "model.bin", state, arrays))
    for key, array in enumerate(arrays):
        assert found[f"t{key}"].dtype == array.dtype
        np.testing.assert_array_equal(found[f"t{key}"], array)
    np.testing.assert_array_equal(found["transposed"], 1 + np.array([[0, 4], [1, 5], [2, 6], [3, 7]]))
    assert found["empty"].shape == (0, 4)
    assert "_metadata" not in found


def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    good = whole(0, FLOATS)
    for entries, found in (
        ({"step": 7}, "int at 'step'"),
        ({"state_dict": {"weight": good}}, "dict at 'state_dict'"),
        ({"state_dict": collections.OrderedDict(weight=good)}, "dict at 'state_dict'"),
        ({"layers": [good]}, "list at 'layers'"),
        ({3: good}, "a name that is int"),
        ({(10**5000,): good}, "a name that is tuple"),
    ):
        with pytest.raises(InvalidBackbone, match=rf"^model\.bin: expected tensors .* found {found}; save"):
            read_torch(write_torch(tmp_path / "model.bin", {"weight": good, **entries}, [FLOATS]))


def test_values_that_torch_has_yet_to_change_are_refused(tmp_path: Path) -> None:
    for bits in ({"neg": True}, {"conj": True}):
        tensor = _Tensor(_Storage("0", FLOATS), 0, (12,), (1,), bits)
        with pytest.raises(InvalidBackbone, match=r"negate or conjugate; save it after tensor\.resolve_neg"):
            read_torch(write_torch(tmp_path / "model.bin", {"weight": tensor}, [FLOATS]))
    plain = _Tensor(_Storage("0", FLOATS), 0, (12,), (1,), {})
    assert "weight" in read_torch(write_torch(tmp_path / "model.bin", {"weight": plain}, [FLOATS]))


def test_same_backbone_as_safetensors(bert: Any, save_hf: Callable[..., Path]) -> None:
    folder = save_hf(bert.settings, bert.tensors)
    expected = read_backbone(folder)
    (folder / "model.safetensors").unlink()
    arrays = list(bert.tensors.values())
    state = {f"bert.{name}": whole(key, arrays[key]) for key, name in enumerate(bert.tensors)}
    write_torch(folder / "pytorch_model.bin", state, arrays)
    assert read_backbone(folder).fingerprint == expected.fingerprint


FLOATS = np.arange(12, dtype=np.float32)


class _Malicious:
    def __reduce__(self) -> Any:
        return os.system, ("touch should-not-exist",)


def test_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidBackbone, match="system, which loading tensors does not need"):
        read_torch(write_torch(tmp_path / "model.bin", {"weight": _Malicious()}, []))
    assert not (tmp_path / "should-not-exist").exists()


@pytest.mark.parametrize(
    "tensor",
    [
        _Tensor(_Storage("0", FLOATS), 0, (13,), (1,)),
        _Tensor(_Storage("0", FLOATS), 4, (3, 3), (4, 1)),
        _Tensor(_Storage("0", FLOATS), -1, (2,), (1,)),
        _Tensor(_Storage("0", FLOATS), 0, (2,), (-1,)),
        _Tensor(_Storage("0", FLOATS), 0, (1 << 40,), (0,)),
        _Tensor(_Storage("0", FLOATS), 0, (2, 2), (1,)),
        _Tensor(_Storage("0", FLOATS), 0, ("2",), (1,)),
        _Tensor(_Storage("9", FLOATS), 0, (2,), (1,)),
        _Tensor(_Tensor(_Storage("0", FLOATS), 11, (12,), (0,)), 0, (12,), (1,)),
        _Tensor(_Tensor(_Storage("0", FLOATS), 0, (6,), (2,)), 0, (6,), (1,)),
        _Tensor(_Tensor(_Storage("0", FLOATS), 0, (2, 6), (6, 1)), 0, (2,), (1,)),
    ],
)
def test_impossible_views_are_refused(tmp_path: Path, tensor: _Tensor) -> None:
    with pytest.raises(InvalidBackbone, match="damaged"):
        read_torch(write_torch(tmp_path / "model.bin", {"weight": tensor}, [FLOATS]))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"weight": 1}))
    with pytest.raises(InvalidBackbone, match="expected a zip archive"):
        read_torch(path)
    with pytest.raises(InvalidBackbone, match="expected a dict of tensors, found list"):
        read_torch(write_torch(path, [1], []))
    with pytest.raises(InvalidBackbone, match="uncompressed"):
        read_torch(write_torch(path, {}, [], zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/0", b"")
    with pytest.raises(InvalidBackbone, match=r"expected one data\.pkl"):
        read_torch(path)


def test_an_archive_with_places_outside_itself_is_refused(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "model.bin", {"weight": whole(0, FLOATS)}, [FLOATS])
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\5\6")
    content[at + 16 : at + 20] = (2 * len(content)).to_bytes(4, "little")  # where the list of entries begins
    path.write_bytes(content)
    with pytest.raises(InvalidBackbone, match=r"^model\.bin: "):
        read_torch(path)
    with pytest.raises(FileNotFoundError):
        read_torch(tmp_path / "nowhere.bin")


def test_a_pickle_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    numbered = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.LONG_BINPUT + (1 << 31).to_bytes(4, "little")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", numbered + pickle.STOP)
    tracemalloc.start()
    with pytest.raises(InvalidBackbone, match="damaged"):
        read_torch(path)
    many = np.zeros(1 << 18, np.float32)
    views: Any = {f"t{at}": whole(0, many) for at in range(200)}
    assert len(read_torch(write_torch(path, views, [many]))) == 200
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * many.nbytes


@pytest.mark.parametrize("opcode", [pickle.MEMOIZE, pickle.EMPTY_LIST])
def test_a_pickle_of_millions_of_steps_is_refused_unread(tmp_path: Path, opcode: bytes) -> None:
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + opcode * (5 << 20))
    tracemalloc.start()
    with pytest.raises(InvalidBackbone, match=r"data\.pkl of at most"):
        read_torch(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("end", [b"N" + pickle.SETITEM, pickle.POP + pickle.EMPTY_SET + pickle.MARK + pickle.ADDITEMS])
def test_a_pickle_that_would_be_hashed_for_ever_is_refused(tmp_path: Path, numbered: bool, end: bytes) -> None:
    """A tuple of the same tuple twice, sixty deep: hashing it takes 2^60 steps, which no signal interrupts."""
    body, path = pickle.EMPTY_TUPLE, tmp_path / "model.bin"
    for depth in range(60):
        number = bytes([depth])
        kept = pickle.BINPUT + number if numbered else pickle.MEMOIZE
        body += kept + pickle.BINGET + number + pickle.TUPLE2
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + body + end + pickle.STOP)
    with pytest.raises(InvalidBackbone, match="damaged"):
        read_torch(path)


def test_damaged_pickles_are_refused(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "model.bin", {"weight": whole(0, FLOATS)}, [FLOATS])
    with zipfile.ZipFile(path) as archive:
        good = archive.read("archive/data.pkl")
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(good)
        for at in rng.integers(0, len(good), 3):
            damaged[at] = rng.integers(0, 256)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", bytes(damaged))
            archive.writestr("archive/data/0", FLOATS.tobytes())
        try:
            read_torch(path)
        except InvalidBackbone:
            continue
