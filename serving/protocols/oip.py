"""The Open Inference Protocol v2 over HTTP: a task is a model, the plain backbone is the model of its name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from jpets.errors import InvalidInput, NotFound, Saturated
from jpets.types import Result, Task
from serving.http.errors import InferenceErrorBody
from serving.http.fields import Int64, Many, ModelName, Text
from serving.http.responses import FastJSONResponse
from serving.protocols.oip_tensors import (
    REPLACED,
    InputTensor,
    OutputTensor,
    inputs_of,
    outputs_of,
    queries_of,
    tensors_of,
)
from serving.requests.ask import ask, raise_first_error
from serving.requests.context import Context, Here, server_version
from serving.requests.routes import JSONRoute

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": InferenceErrorBody} for status in (400, 404, 408, 413, 415, 422, 431, 500, 503, 504, 507)
}
router = APIRouter(prefix="/v2", tags=["open inference protocol"], responses=ERRORS)

BACKBONE_VERSION = "1"
MOST_ID = 1024
"""Characters of a request's id, which comes back."""
EXAMPLES = {
    "texts": {
        "value": {
            "id": "42",
            "inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["one text", "another"]}],
            "outputs": [{"name": "label"}, {"name": "score"}],
            "parameters": {"truncate": True, "timeout": 500000},
        }
    },
    "token ids": {
        "value": {
            "inputs": [
                {"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "data": [101, 2023, 102, 0]},
                {"name": "attention_mask", "shape": [1, 4], "datatype": "INT64", "data": [1, 1, 1, 0]},
            ]
        }
    },
}


class Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule."""
    timeout: Annotated[Int64, Field(gt=0)] | None = None
    """Microseconds until the request's deadline."""
    binary_data_output: StrictBool | None = None
    """Accepted because Triton's clients send it; answers are always JSON."""
    priority: Literal[0] | None = None
    sequence_id: Literal[0, ""] | None = None
    sequence_start: Literal[False] | None = None
    sequence_end: Literal[False] | None = None
    """Values that Triton takes for not given; others are refused."""


class OutputParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    binary_data: StrictBool | None = None
    """Accepted because Triton's clients send it; answers are always JSON."""
    classification: Literal[0] | None = None


class RequestedOutput(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: ModelName
    parameters: OutputParameters | None = None


class InferRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: Annotated[Text, Field(max_length=MOST_ID)] | None = None
    parameters: Parameters | None = None
    inputs: Many[InputTensor]
    outputs: Many[RequestedOutput] | None = None


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class TensorMetadata(BaseModel):
    """-1 in a shape is any size."""

    name: str
    datatype: Literal["BYTES", "INT64", "FP32"]
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@router.get("", response_model=ServerMetadata, summary="Server metadata")
async def server_metadata() -> ServerMetadata:
    return ServerMetadata(name="jpets", version=server_version(), extensions=[])


@router.get("/health/live", response_model=Live, responses={503: {"model": Live}}, summary="Is the process alive?")
async def live(here: Here) -> FastJSONResponse:
    """503 when only a new process can help: the device's threads have died or make no progress."""
    alive = here.services.live
    return FastJSONResponse({"live": alive}, 200 if alive else 503)


@router.get("/health/ready", response_model=Ready, responses={503: {"model": Ready}}, summary="Can it take queries?")
async def ready(here: Here) -> FastJSONResponse:
    """503 until the programs are compiled and the repository's tasks are loaded, and again while it drains."""
    able = here.services.first.ready
    return FastJSONResponse({"ready": able}, 200 if able else 503)


@router.get("/models/{model}", response_model=ModelMetadata, summary="A task's inputs and outputs")
@router.get("/models/{model}/versions/{version}", response_model=ModelMetadata, summary="The same, of a version")
async def model_metadata(here: Here, model: str, version: str | None = None) -> ModelMetadata:
    task, number = await _find(here, model, version)
    return ModelMetadata(
        name=model,
        versions=[number],
        platform="jpets_jax",
        inputs=[TensorMetadata.model_validate(each) for each in inputs_of()],
        outputs=[TensorMetadata.model_validate(each) for each in outputs_of(task, _hidden_size(here, task))],
    )


@router.get("/models/{model}/ready", response_model=ModelReady, summary="Is a task loaded?")
@router.get("/models/{model}/versions/{version}/ready", response_model=ModelReady, summary="Is a version loaded?")
async def model_ready(here: Here, model: str, version: str | None = None) -> FastJSONResponse:
    await _find(here, model, version)
    able = here.services.first.ready
    return FastJSONResponse({"name": model, "ready": able}, 200 if able else 503)


async def infer(
    request: Request,
    here: Here,
    model: str,
    body: Annotated[InferRequest, Body(openapi_examples=EXAMPLES)],
    version: str | None = None,
) -> FastJSONResponse:
    """Inputs: `text` and maybe `text_pair` (BYTES, [N]), or `input_ids` and maybe `attention_mask` (padding on the
    right only) and `token_type_ids` (INT64, [N, L]); ids include the special tokens.

    Outputs by head: `logits`, `label`, `score`; regression `logits`, `score`; tokens the same for each token (an empty
    label and the score 0 for special tokens), padded to the longest, with `lengths`; question answering (`text` is the
    question, `text_pair` the context) `logits` for each token, `start` and `end` (token positions, `end` exclusive),
    `score`, and `answer`, which is empty where token ids were sent, with `lengths`; embedding heads and the backbone
    `embedding`; a group of students also `students`, how many of them made each answer. The first row that fails, fails
    the request.
    """
    task, number = await _find(here, model, version)
    known = [each["name"] for each in outputs_of(task, _hidden_size(here, task))]
    wanted = known if body.outputs is None else [each.name for each in body.outputs]
    if unknown := [name[:64] for name in wanted if name not in known]:
        raise InvalidInput(f"outputs: expected some of {known}, found {unknown[:4]}")
    if len(set(wanted)) < len(wanted):
        raise InvalidInput(f"outputs: expected each name once, found {len(wanted)} with {len(set(wanted))} names")
    asked, most = body.parameters or Parameters(), here.settings.max_inputs
    read = partial(queries_of, body.inputs, task.id if task else None, asked.truncate, most)
    queries = await here.aside.do(sum(len(tensor.data) for tensor in body.inputs), read)

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        raise_first_error(results)
        tensors = tensors_of(results)
        if not tensors.keys() >= set(wanted):
            raise Saturated(REPLACED)
        answer: dict[str, Any] = {"model_name": model, "model_version": number}
        if body.id is not None:
            answer["id"] = body.id
        return {**answer, "outputs": [tensors[name] for name in wanted]}

    timeout = None if asked.timeout is None else asked.timeout / 1e6
    return await ask(request, here, queries, respond, timeout)


for path, summary in (
    ("/models/{model}/infer", "Ask a task"),
    ("/models/{model}/versions/{version}/infer", "Ask a version of a task"),
):
    router.add_api_route(
        path, infer, methods=["POST"], response_model=InferResponse, summary=summary, route_class_override=JSONRoute
    )


def _hidden_size(here: Context, task: Task | None) -> int:
    return task.backbone.hidden_size if task is not None else here.services.first.backbone.config.hidden_size


async def _find(here: Context, model: str, version: str | None) -> tuple[Task | None, str]:
    """The model and its served version. Raises ``NotFound``."""
    task = await here.find(model)
    number = BACKBONE_VERSION
    if task is not None:
        with here.services.owning(here.named(model)) as own:
            number = str(own.tasks.version(here.named(model)))
    if version not in (None, number):
        raise NotFound(f"model {model[:128]!r} has version {number} loaded, and no other")
    return task, number
