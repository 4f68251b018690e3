"""Tensors of the Open Inference Protocol: from a request's to queries, from results to a response's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict

from jpets.engine.results.numbers import softmax
from jpets.errors import InvalidInput, Saturated, TooLarge
from jpets.types import Classification, Embedding, FloatArray, Query, Regression, Result, Span, Task, Tokens
from serving.http.fields import Int64, Many, ModelName, is_unicode
from serving.requests.bodies import NO_TENSORS

Ints = npt.NDArray[np.int64]
DATATYPES = {
    "text": "BYTES",
    "text_pair": "BYTES",
    "input_ids": "INT64",
    "attention_mask": "INT64",
    "token_type_ids": "INT64",
}
"""The possible inputs and their datatypes."""


REPLACED = "the task was replaced while this request ran; send it again"


def _no_binary(given: object) -> None:
    if given is not None:
        raise ValueError(NO_TENSORS)


class InputParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    binary_data: Literal[False] | None = None
    binary_data_size: Annotated[None, BeforeValidator(_no_binary)] = None


class InputTensor(BaseModel):
    """``data`` is flat in row-major order, or nested as ``shape`` says."""

    model_config = ConfigDict(extra="forbid")
    name: ModelName
    shape: Many[Int64]
    datatype: ModelName
    parameters: InputParameters | None = None
    data: list[Any]


class OutputTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


def inputs_of() -> list[dict[str, Any]]:
    """Metadata of the inputs, the same for every model; a request sends ``text`` or ``input_ids``."""
    return [
        {"name": name, "datatype": datatype, "shape": [-1] if datatype == "BYTES" else [-1, -1]}
        for name, datatype in DATATYPES.items()
    ]


def outputs_of(task: Task | None, hidden_size: int) -> list[dict[str, Any]]:
    """Metadata of a model's outputs; those of a group say how many students made them."""
    own = _outputs_of(task, hidden_size)
    return own if task is None or task.students is None else [*own, _each("students", "INT64")]


def _outputs_of(task: Task | None, hidden_size: int) -> list[dict[str, Any]]:
    if task is None or task.head.type == "embedding":
        return [{"name": "embedding", "datatype": "FP32", "shape": [-1, hidden_size]}]
    rows = [-1, -1] if task.head.reads_tokens else [-1]
    logits = {"name": "logits", "datatype": "FP32", "shape": [*rows, task.head.outputs]}
    label = {"name": "label", "datatype": "BYTES", "shape": rows}
    score = {"name": "score", "datatype": "FP32", "shape": rows}
    if task.head.type == "token-classification":
        return [logits, label, score, _each("lengths", "INT64")]
    if task.head.type == "question-answering":
        places = [_each("start", "INT64"), _each("end", "INT64")]
        return [logits, *places, _each("score", "FP32"), _each("answer", "BYTES"), _each("lengths", "INT64")]
    return [logits, score] if task.head.problem == "regression" else [logits, label, score]


def _each(name: str, datatype: str) -> dict[str, Any]:
    """Metadata of an output with one value a row."""
    return {"name": name, "datatype": datatype, "shape": [-1]}


def queries_of(tensors: Sequence[InputTensor], task: str | None, truncate: bool | None, most: int) -> list[Query]:
    """One query a row. Raises ``InvalidInput`` naming the tensor, what was expected and what was found."""
    given = {tensor.name: tensor for tensor in tensors}
    unknown = sorted(given.keys() - DATATYPES.keys())
    if unknown:
        raise InvalidInput(f"inputs: expected some of {list(DATATYPES)}, found {[name[:64] for name in unknown[:4]]}")
    if len(given) != len(tensors):
        raise InvalidInput(f"inputs: expected each name once, found {len(tensors)} tensors with {len(given)} names")
    for tensor in tensors:
        _check(tensor, most)
    if given.keys() <= {"text", "text_pair"} and "text" in given:
        return _text_queries(given, task, truncate)
    if "input_ids" in given and not given.keys() & {"text", "text_pair"}:
        return _id_queries(given, task)
    raise InvalidInput(
        "inputs: expected text (and text_pair), or input_ids (and attention_mask, token_type_ids), "
        f"found {sorted(given)}"
    )


def _check(tensor: InputTensor, most: int) -> None:
    """Datatype, rank and size."""
    name, expected = tensor.name, DATATYPES[tensor.name]
    if tensor.datatype != expected:
        raise InvalidInput(f"{name}: expected datatype {expected}, found {tensor.datatype[:32]!r}")
    rank = 1 if expected == "BYTES" else 2
    if len(tensor.shape) != rank or min(tensor.shape) < 1:
        layout = "[N]" if rank == 1 else "[N, L]"
        raise InvalidInput(f"{name}: expected shape {layout} with sizes from 1, found {tensor.shape[:8]}")
    if tensor.shape[0] > most:
        raise TooLarge(f"{name}: {tensor.shape[0]} rows, the limit is {most}; split them into several requests")


def _values(tensor: InputTensor) -> list[Any]:
    """The data, flat. Raises ``InvalidInput`` where it does not fill the shape."""
    data, shape = tensor.data, tensor.shape
    if len(shape) == 2 and data and all(isinstance(row, list) for row in data):
        widths = {len(row) for row in data}
        if len(data) != shape[0] or widths != {shape[1]}:
            raise InvalidInput(
                f"{tensor.name}: expected data of shape {shape}, found {len(data)} rows of {sorted(widths)[:4]}"
            )
        data = [value for row in data for value in row]
    expected = int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise InvalidInput(f"{tensor.name}: shape {shape} needs {expected} values, found {len(data)}")
    return data


def _texts(tensor: InputTensor) -> list[str]:
    data = _values(tensor)
    for value in data:
        if not isinstance(value, str):
            raise InvalidInput(f"{tensor.name}: expected texts, found {type(value).__name__}")
        if not is_unicode(value):
            raise InvalidInput(f"{tensor.name}: expected valid Unicode, found half of a surrogate pair")
    return data


def _ints(tensor: InputTensor) -> Ints:
    data = _values(tensor)
    for value in data:
        if type(value) is not int:  # a bool is an int to isinstance
            raise InvalidInput(f"{tensor.name}: expected integers, found {type(value).__name__}")
    try:
        return np.array(data, np.int64).reshape(tensor.shape)
    except OverflowError as error:
        raise InvalidInput(f"{tensor.name}: expected 64-bit integers, found a larger one") from error


def _text_queries(given: dict[str, InputTensor], task: str | None, truncate: bool | None) -> list[Query]:
    texts = _texts(given["text"])
    pairs: Sequence[str | None] = _texts(given["text_pair"]) if "text_pair" in given else [None] * len(texts)
    if len(pairs) != len(texts):
        raise InvalidInput(f"text_pair: expected shape {given['text'].shape} as text, found {given['text_pair'].shape}")
    return [Query(task, text, pair, truncate=truncate) for text, pair in zip(texts, pairs, strict=True)]


def _id_queries(given: dict[str, InputTensor], task: str | None) -> list[Query]:
    arrays = {name: _ints(tensor) for name, tensor in given.items()}
    ids = arrays["input_ids"]
    for name, array in arrays.items():
        if array.shape != ids.shape:
            raise InvalidInput(f"{name}: expected shape {list(ids.shape)} as input_ids, found {list(array.shape)}")
    lengths = _lengths(arrays["attention_mask"]) if "attention_mask" in arrays else [ids.shape[1]] * len(ids)
    types = arrays.get("token_type_ids")
    return [
        Query(
            task,
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


def tensors_of(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """The outputs of one task's results, by name; none may be an error.

    Raises ``Saturated`` where rows saw different versions of the task with outputs of different shapes.
    """
    if len({_layout(result) for result in results}) > 1:
        raise Saturated(REPLACED)
    students = [result.students for result in results if result.students is not None]
    own = _tensors_of(results)
    return {**own, **_named(students=np.array(students, np.int64))} if students else own


def _tensors_of(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    first = results[0]
    if isinstance(first, Embedding):
        return _named(embedding=np.stack([r.embedding for r in results if isinstance(r, Embedding)]))
    if isinstance(first, Tokens):
        return _token_tensors([r for r in results if isinstance(r, Tokens)])
    if isinstance(first, Span):
        return _span_tensors([r for r in results if isinstance(r, Span)])
    rows = [r for r in results if isinstance(r, (Classification, Regression))]
    logits, score = np.stack([r.logits for r in rows]), np.array([r.score for r in rows], np.float32)
    if isinstance(first, Regression):
        return _named(logits=logits, score=score)
    return _named(logits=logits, label=np.array([r.label for r in rows if isinstance(r, Classification)]), score=score)


def _layout(result: Result) -> tuple[str, tuple[str, ...], int, bool]:
    names = result.names if isinstance(result, (Classification, Tokens)) else ()
    values = result.logits.size if isinstance(result, Regression) else 0
    return type(result).__name__, names, values, result.students is None


def _token_tensors(rows: Sequence[Tokens]) -> dict[str, dict[str, Any]]:
    """Tokens that belong to no text, such as special ones, get an empty label and the score 0."""
    logits, lengths = _padded([r.logits for r in rows])
    label = np.full(logits.shape[:2], "", dtype=object)
    score = np.zeros(logits.shape[:2], np.float32)
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        probs, own = softmax(row.logits), row.spelling.of_text if row.spelling else np.zeros(length, np.int8)
        score[at, :length] = np.where(own >= 0, probs.max(-1), 0)
        label[at, :length] = [
            row.names[best] if of >= 0 else "" for best, of in zip(probs.argmax(-1), own, strict=True)
        ]
    return _named(logits=logits, label=label, score=score, lengths=lengths)


def _span_tensors(rows: Sequence[Span]) -> dict[str, dict[str, Any]]:
    """``start`` and ``end`` (exclusive) count tokens; ``answer`` is empty where ids were sent, not texts."""
    logits, lengths = _padded([r.logits for r in rows])
    start, end = np.array([r.start for r in rows], np.int64), np.array([r.end for r in rows], np.int64)
    score = np.array([r.score for r in rows], np.float32)
    answer = np.array([r.answer.text if r.answer is not None else "" for r in rows], dtype=object)
    return _named(logits=logits, start=start, end=end, score=score, answer=answer, lengths=lengths)


def _padded(logits: Sequence[FloatArray]) -> tuple[FloatArray, Ints]:
    """Logits [tokens, C] of several rows as [N, most tokens, C], with zeros behind, and each row's number of tokens."""
    lengths = np.array([len(each) for each in logits], np.int64)
    padded = np.zeros((len(logits), int(lengths.max()), logits[0].shape[-1]), np.float32)
    for row, each in zip(padded, logits, strict=True):
        row[: len(each)] = each
    return padded, lengths


def _named(**arrays: npt.NDArray[Any]) -> dict[str, dict[str, Any]]:
    kinds = {"f": "FP32", "i": "INT64"}
    return {
        name: {
            "name": name,
            "shape": list(array.shape),
            "datatype": kinds.get(array.dtype.kind, "BYTES"),
            "data": array.ravel() if array.dtype.kind in kinds else array.ravel().tolist(),
        }
        for name, array in arrays.items()
    }
