"""Requests for inference over gRPC: from their messages to queries, from results to answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpets.errors import InvalidInput, TooLarge
from jpets.types import Result
from serving.grpc.messages import InferResponse, OutputTensor
from serving.http.body_bounds import Bounds
from serving.http.settings import ServingSettings
from serving.protocols.oip.inference import MOST_ID, Asked, Inference
from serving.protocols.oip.inputs import DATATYPES
from serving.protocols.oip.parameters import Parameters, parameters_in
from serving.protocols.oip.tensors import Tensor, datatype_of, raw_of

MOST_NAMED = 64
"""Inputs, outputs or parameters of a message: no model has so many, and each costs time on the event loop."""
MOST_VALUES = Bounds().values
CONTENTS = {"BYTES": "bytes_contents", "INT64": "int64_contents"}
"""The field with a tensor's values, where they do not come as raw bytes."""
EMPTY_FINAL, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""On streams of Triton's clients: that an empty answer may end those to a request, and which one is the last. Here the
only one is."""


def parameters_of(request: Any, *, streamed: bool = False) -> Parameters:
    """``streamed``: of a request on a stream. Raises ``InvalidInput`` for unknown ones, and for other values;
    ``TooLarge`` for many inputs, outputs or parameters."""
    check_counts(request, "inputs", "outputs", "parameters", "raw_input_contents")
    given = {name: _value(each) for name, each in request.parameters.items()}
    if streamed and not isinstance(given.pop(EMPTY_FINAL, False), bool):
        raise InvalidInput(f"parameters.{EMPTY_FINAL}: expected true or false")
    return parameters_in(given) if given else Parameters()


def check_counts(request: Any, *fields: str) -> None:
    """Raises ``TooLarge`` where one of a message's fields holds many."""
    for name in fields:
        if (found := len(getattr(request, name))) > MOST_NAMED:
            raise TooLarge(f"{name}: expected at most {MOST_NAMED}, found {found}")


def seconds_of(parameters: Parameters, waits: float | None, settings: ServingSettings) -> float:
    """How long after a request came it may be answered, where its client waits for ``waits`` seconds then, or has no
    deadline; to wait for longer than the server allows is no error. Raises ``InvalidInput`` for a timeout that is too
    long."""
    if parameters.timeout is None:
        return settings.request_timeout if waits is None else min(waits, settings.longest_timeout)
    asked = parameters.timeout / 1e6
    if asked > settings.longest_timeout:
        raise InvalidInput(f"parameters.timeout: expected at most {settings.longest_timeout:g} seconds")
    return asked if waits is None else min(asked, waits)


def check_unload(request: Any) -> None:
    """Raises ``InvalidInput`` for parameters but for the one that Triton's clients send, ``TooLarge``."""
    check_counts(request, "parameters")
    if unknown := [name[:64] for name in request.parameters if name != "unload_dependents"]:
        raise InvalidInput(f"parameters: expected unload_dependents or none, found {unknown[:4]}")


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def inference_of(request: Any, parameters: Parameters) -> Inference:
    """Raises ``InvalidInput``, ``TooLarge``. To be called behind ``parameters_of``."""
    if len(request.id) > MOST_ID:
        raise TooLarge(f"id: expected at most {MOST_ID} characters, found {len(request.id)}")
    for each in (*request.inputs, *request.outputs):
        _check_parameters(each)
    outputs = [each.name for each in request.outputs] or None
    return Inference(_tensors(request), outputs, parameters)


def _check_parameters(tensor: Any) -> None:
    """Tensors are never in shared memory, and never as classes."""
    check_counts(tensor, "parameters")
    given = {name: _value(each) for name, each in tensor.parameters.items()}
    given.pop("binary_data", None)
    if not given.pop("classification", 0) and not given:
        return
    raise InvalidInput(
        f"{tensor.name[:64]}: expected no parameters, found {[name[:64] for name in tensor.parameters][:4]}"
    )


def _tensors(request: Any) -> list[Tensor]:
    """All tensors come as raw bytes, or none."""
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInput(
            f"raw_input_contents: expected one for each of {len(request.inputs)} inputs, found {len(raw)}"
        )
    found = []
    for at, each in enumerate(request.inputs):
        filled = [field.name for field, _ in each.contents.ListFields()]
        expected = CONTENTS.get(DATATYPES.get(each.name, ""))
        if raw and filled:
            raise InvalidInput(f"{each.name[:64]}: expected contents or raw_input_contents, found both")
        if filled and expected is not None and filled != [expected]:
            raise InvalidInput(f"{each.name}: expected values in contents.{expected}, found some in {filled}")
        values = getattr(each.contents, expected) if expected is not None else ()
        if len(values) > MOST_VALUES:
            raise TooLarge(f"{each.name}: expected at most {MOST_VALUES} values, found {len(values)}")
        data = memoryview(raw[at]) if raw else list(values)
        found.append(Tensor(each.name, each.datatype, list(each.shape), data))
    return found


def response_of(request: Any, asked: Asked, effort: int, results: Sequence[Result]) -> Any:
    """The answer's message, with raw bytes as Triton's has them. Raises the first row's error."""
    del effort
    arrays = asked.arrays(results)
    return InferResponse(
        model_name=asked.model.name,
        model_version=asked.version(results),
        id=request.id,
        outputs=[
            OutputTensor(name=name, datatype=datatype_of(array), shape=array.shape) for name, array in arrays.items()
        ],
        raw_output_contents=[raw_of(array) for array in arrays.values()],
    )
