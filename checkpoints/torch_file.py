"""Reading ``pytorch_model.bin`` without PyTorch, and without running what the pickle inside asks for.

The file is a zip archive: ``<root>/data.pkl`` describes tensors as views into ``<root>/data/<key>``. The pickle may
name only the functions and storage types below; anything else is refused before it is looked up.
"""

from __future__ import annotations

import errno
import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from checkpoints.zip_directory import open_archive
from jpets.errors import InvalidBackbone

Array = npt.NDArray[Any]
STORAGES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "FloatStorage": np.dtype("<f4"),
        "DoubleStorage": np.dtype("<f8"),
        "HalfStorage": np.dtype("<f2"),
        "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
        "LongStorage": np.dtype("<i8"),
        "IntStorage": np.dtype("<i4"),
        "ShortStorage": np.dtype("<i2"),
        "CharStorage": np.dtype("i1"),
        "ByteStorage": np.dtype("u1"),
        "BoolStorage": np.dtype("?"),
    }
)
BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What a damaged or hostile pickle makes the unpickler raise."""
TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
MOST_DIRECTORY, MOST_DESCRIBED = 4 << 20, 4 << 20
"""Bytes of an archive's directory, and of its pickle: those of a model of 1,000 tensors have 100 KB."""
MOST_SHARED = 16
"""Times that a pickle may come back to a tuple: PyTorch makes each anew."""
METADATA = "_metadata"
"""Versions of modules, which some keep among the tensors; PyTorch itself hangs them on the state dict."""


def read_torch(path: Path) -> dict[str, Array]:
    """Name -> array of every tensor in a state dict. Raises ``InvalidBackbone``, also for what is no tensor there."""
    try:
        with open_archive(path, MOST_DIRECTORY) as archive:
            roots = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("data.pkl")]
            if len(roots) != 1:
                raise InvalidBackbone(f"{path.name}: expected one data.pkl in the archive, found {len(roots)}")
            state = _Reader(archive, roots[0], path.stat().st_size).load()
    except zipfile.BadZipFile as error:
        raise InvalidBackbone(
            f"{path.name}: expected a zip archive as PyTorch writes since 1.6; save the model again as safetensors"
        ) from error
    except (*BROKEN, RecursionError, OverflowError, MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, InvalidBackbone) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        raise InvalidBackbone(f"{path.name}: the pickle inside is damaged; download the file again") from error
    if not isinstance(state, dict):
        raise InvalidBackbone(f"{path.name}: expected a dict of tensors, found {type(state).__name__}")
    state.pop(METADATA, None)
    others = [_described(name, value) for name, value in state.items() if not _is_tensor(name, value)]
    if others:
        raise InvalidBackbone(
            f"{path.name}: expected tensors with their names alone, found {', '.join(others[:5])}; save the state dict "
            "itself"
        )
    return dict(state)


def _is_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, np.ndarray)


def _described(name: object, value: object) -> str:
    """An entry of a state dict that is no tensor; keys that are no text may be too much to print."""
    kind = "dict" if isinstance(value, dict) else type(value).__name__
    return f"{kind} at {name[:100]!r}" if isinstance(name, str) else f"a name that is {type(name).__name__}"


class _Ordered(dict[Any, Any]):
    """Stands for ``OrderedDict``; the attributes that PyTorch hangs on a state dict are dropped."""

    def __setstate__(self, state: object) -> None:
        """Ignores the state."""


class _Call:
    """A function for the pickle to call; without a ``__dict__``, so that the pickle cannot change it."""

    __slots__ = ("_function",)
    _function: Callable[..., Array]

    def __init__(self, function: Callable[..., Array]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __call__(self, *args: Any) -> Array:
        return self._function(*args)


class _Reader(pickle.Unpickler):
    """Unpickles one archive. ``budget`` bounds the bytes read: the entries of a hostile zip may overlap."""

    def __init__(self, archive: zipfile.ZipFile, root: str, budget: int) -> None:
        self._archive, self._root, self._budget = archive, root, budget
        self._storages: dict[str, Array] = {}
        if f"{root}byteorder" in archive.namelist() and self._bytes("byteorder") != b"little":
            raise InvalidBackbone("expected little-endian tensors; save the model again as safetensors")
        if self._archive.getinfo(f"{root}data.pkl").file_size > MOST_DESCRIBED:
            raise InvalidBackbone(f"expected a data.pkl of at most {MOST_DESCRIBED:,} bytes; save as safetensors")
        described = self._bytes("data.pkl")
        _check_described(described)
        super().__init__(io.BytesIO(described))

    def _bytes(self, name: str) -> bytes:
        info = self._archive.getinfo(self._root + name)
        self._budget -= info.file_size
        if info.compress_type != zipfile.ZIP_STORED or self._budget < 0:
            raise InvalidBackbone("expected an archive of uncompressed entries; save the model again as safetensors")
        return self._archive.read(info)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Call(_view)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _Call(lambda data, requires_grad, hooks: data)
        if (module, name) == ("collections", "OrderedDict"):
            return _Ordered
        if module == "torch" and name in STORAGES:
            return name
        raise InvalidBackbone(
            f"the checkpoint's pickle asks for {module[:80]}.{name[:80]}, which loading tensors does not need; "
            "do not trust this file, or save the model again as safetensors"
        )

    def persistent_load(self, pid: Any) -> Array:
        kind, storage, key, _location, numel = pid
        if kind != "storage" or not isinstance(numel, int) or not all(isinstance(each, str) for each in (storage, key)):
            raise pickle.UnpicklingError("unknown persistent id")
        if key not in self._storages:
            self._storages[key] = np.frombuffer(self._bytes(f"data/{key}"), np.uint8)
        return self._storages[key][: numel * STORAGES[storage].itemsize].view(STORAGES[storage])


def _check_described(described: bytes) -> None:
    """Refuses what the unpickler, which is C and cannot be interrupted, would take too much memory or time for.

    It makes room up to the highest number of its memo: no pickle needs one beyond its own length. And it hashes keys:
    a tuple of tuples that are shared takes a time that doubles with every one.
    """
    tuples: dict[int, bool] = {}  # number in the memo -> whether it is a tuple
    shared, before = 0, ""
    for opcode, argument, _ in pickletools.genops(described):
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            number = len(tuples) if name == "MEMOIZE" else int(argument or 0)
            if number > len(described):
                raise pickle.UnpicklingError("impossible memo")
            tuples[number] = before in TUPLES
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            shared += tuples.get(int(argument or 0), False)
        if name == "DUP" or shared > MOST_SHARED:
            raise pickle.UnpicklingError("too many tuples in tuples")
        before = name


def _view(
    storage: Array,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _grad: bool = False,
    _hooks: object = None,
    lazy: object = None,
) -> Array:
    """The tensor at ``offset`` of a 1-D storage, which it keeps; sizes and strides count elements.

    ``lazy`` says what PyTorch has yet to do with the values, such as to negate them.
    """
    if lazy:
        raise InvalidBackbone(
            "expected tensors as they are stored, found one whose values PyTorch has yet to negate or conjugate; save "
            "it after tensor.resolve_neg().resolve_conj()"
        )
    numbers = (offset, *size, *stride)
    if not isinstance(storage, np.ndarray) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("impossible view")
    if len(size) != len(stride):
        raise pickle.UnpicklingError("impossible view")
    if storage.ndim != 1 or storage.strides != (storage.itemsize,):  # a view of a view: it may have fewer elements
        raise pickle.UnpicklingError("a view of something else than a storage")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = int(np.prod([1, *size], dtype=object))
    if count == 0:
        return np.zeros(size, storage.dtype)
    if last >= storage.size or count > storage.size:
        raise pickle.UnpicklingError("view outside its storage")
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)
