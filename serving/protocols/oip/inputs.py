"""From the Open Inference Protocol's inputs to queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jpets.errors import InvalidInput, TooLarge
from jpets.types import Query, Task
from serving.http.fields import is_unicode
from serving.protocols.oip.tensors import Ints, Tensor, raw_ints, raw_texts

TASK = "task"
"""An input of the backbone's model: the task that answers a row."""
DATATYPES = {
    "text": "BYTES",
    "text_pair": "BYTES",
    "input_ids": "INT64",
    "attention_mask": "INT64",
    "token_type_ids": "INT64",
    TASK: "BYTES",
}
"""The possible inputs and their datatypes."""


def inputs_of(task: Task | None) -> list[dict[str, Any]]:
    """Metadata of the inputs of a task's model, or of the backbone's; a request sends ``text`` or ``input_ids``."""
    return [
        {"name": name, "datatype": datatype, "shape": [-1] if datatype == "BYTES" else [-1, -1]}
        for name, datatype in DATATYPES.items()
        if task is None or name != TASK
    ]


def several_of(
    tensors: Sequence[Tensor], task_id: Callable[[str], str | None], pattern: Query, most: int
) -> list[Query]:
    """``pattern`` for each of the tasks that the input ``task`` names, with a row of its own or the only row. Raises as
    ``queries_of``."""
    names, *others = [tensor for tensor in tensors if tensor.name == TASK]
    if others:
        raise InvalidInput(f"inputs: expected each name once, found {1 + len(others)} of {TASK}")
    _check(names, most)
    tasks = _texts(names)
    rows = queries_of([tensor for tensor in tensors if tensor is not names], pattern, most)
    if len(rows) not in (1, len(tasks)):
        raise InvalidInput(
            f"{TASK}: expected a name for each of {len(rows)} rows, or one row, found {len(tasks)} names"
        )
    rows = rows * len(tasks) if len(rows) == 1 else rows
    return [dataclasses.replace(row, task=task_id(name)) for row, name in zip(rows, tasks, strict=True)]


def queries_of(tensors: Sequence[Tensor], pattern: Query, most: int) -> list[Query]:
    """``pattern`` with the text, or the token ids, of each row. Raises ``InvalidInput`` naming the tensor, what was
    expected and what was found."""
    given = {tensor.name: tensor for tensor in tensors}
    known = [name for name in DATATYPES if name != TASK]
    if unknown := sorted(given.keys() - known):
        raise InvalidInput(f"inputs: expected some of {known}, found {[name[:64] for name in unknown[:4]]}")
    if len(given) != len(tensors):
        raise InvalidInput(f"inputs: expected each name once, found {len(tensors)} tensors with {len(given)} names")
    for tensor in tensors:
        _check(tensor, most)
    if given.keys() <= {"text", "text_pair"} and "text" in given:
        return _text_queries(given, pattern)
    if "input_ids" in given and not given.keys() & {"text", "text_pair"}:
        return _id_queries(given, pattern)
    raise InvalidInput(
        "inputs: expected text (and text_pair), or input_ids (and attention_mask, token_type_ids), "
        f"found {sorted(given)}"
    )


def _check(tensor: Tensor, most: int) -> None:
    """Datatype, rank and size."""
    name, expected = tensor.name, DATATYPES[tensor.name]
    if tensor.datatype != expected:
        raise InvalidInput(f"{name}: expected datatype {expected}, found {tensor.datatype[:32]!r}")
    rank = 1 if expected == "BYTES" else 2
    if len(tensor.shape) != rank or min(tensor.shape) < 1:
        layout = "[N]" if rank == 1 else "[N, L]"
        raise InvalidInput(f"{name}: expected shape {layout} with sizes from 1, found {list(tensor.shape[:8])}")
    if tensor.shape[0] > most:
        raise TooLarge(f"{name}: {tensor.shape[0]} rows, the limit is {most}; split them into several requests")


def _values(tensor: Tensor, data: Sequence[Any]) -> Sequence[Any]:
    """The data, flat. Raises ``InvalidInput`` where it does not fill the shape."""
    shape = tensor.shape
    if len(shape) == 2 and data and all(isinstance(row, list) for row in data):
        widths = {len(row) for row in data}
        if len(data) != shape[0] or widths != {shape[1]}:
            raise InvalidInput(
                f"{tensor.name}: expected data of shape {list(shape)}, found {len(data)} rows of {sorted(widths)[:4]}"
            )
        data = [value for row in data for value in row]
    if len(data) != _size(tensor):
        raise InvalidInput(f"{tensor.name}: shape {list(shape)} needs {_size(tensor)} values, found {len(data)}")
    return data


def _size(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape, dtype=object))


def _texts(tensor: Tensor) -> list[str]:
    data: Sequence[Any]
    if isinstance(tensor.data, memoryview):
        data = raw_texts(tensor.name, tensor.data, _size(tensor))
    else:
        data = _values(tensor, tensor.data)
    return [_text(tensor.name, value) for value in data]


def _text(name: str, value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{name}: expected UTF-8, found other bytes") from error
    if not isinstance(value, str):
        raise InvalidInput(f"{name}: expected texts, found {type(value).__name__}")
    if not is_unicode(value):
        raise InvalidInput(f"{name}: expected valid Unicode, found half of a surrogate pair")
    return value


def _ints(tensor: Tensor) -> Ints:
    if isinstance(tensor.data, memoryview):
        return raw_ints(tensor.name, tensor.data, _size(tensor)).reshape(tensor.shape)
    data = _values(tensor, tensor.data)
    for value in data:
        if type(value) is not int:  # a bool is an int to isinstance
            raise InvalidInput(f"{tensor.name}: expected integers, found {type(value).__name__}")
    try:
        return np.array(data, np.int64).reshape(tensor.shape)
    except OverflowError as error:
        raise InvalidInput(f"{tensor.name}: expected 64-bit integers, found a larger one") from error


def _text_queries(given: dict[str, Tensor], pattern: Query) -> list[Query]:
    texts = _texts(given["text"])
    pairs: Sequence[str | None] = _texts(given["text_pair"]) if "text_pair" in given else [None] * len(texts)
    if len(pairs) != len(texts):
        raise InvalidInput(f"text_pair: expected shape {list(given['text'].shape)} as text, found {len(pairs)} values")
    return [dataclasses.replace(pattern, text=text, text_pair=pair) for text, pair in zip(texts, pairs, strict=True)]


def _id_queries(given: dict[str, Tensor], pattern: Query) -> list[Query]:
    arrays = {name: _ints(tensor) for name, tensor in given.items()}
    ids = arrays["input_ids"]
    for name, array in arrays.items():
        if array.shape != ids.shape:
            raise InvalidInput(f"{name}: expected shape {list(ids.shape)} as input_ids, found {list(array.shape)}")
    lengths = _lengths(arrays["attention_mask"]) if "attention_mask" in arrays else [ids.shape[1]] * len(ids)
    types = arrays.get("token_type_ids")
    return [
        dataclasses.replace(
            pattern,
            input_ids=ids[row, :length].tolist(),
            token_type_ids=None if types is None else types[row, :length].tolist(),
        )
        for row, length in enumerate(lengths)
    ]


def _lengths(mask: Ints) -> list[int]:
    """Tokens of each row of an attention mask with padding on the right."""
    lengths = mask.astype(bool).sum(1)
    if np.any(mask != (np.arange(mask.shape[1]) < lengths[:, None])) or np.any(lengths == 0):
        raise InvalidInput(
            "attention_mask: expected ones, at least one in each row, and then zeros; found another mask"
        )
    return [int(length) for length in lengths]
