"""The Open Inference Protocol v2 over HTTP: a task is a model, the plain backbone is the model of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from jpets.errors import InvalidInput
from jpets.types import Result
from serving.http.errors import INFERENCE_ERRORS
from serving.http.fields import Int64, Many, ModelName, Text
from serving.http.responses import FastJSONResponse
from serving.protocols.oip import binary
from serving.protocols.oip.inference import EXTENSIONS, MOST_ID, Inference, find_model, read_inference
from serving.protocols.oip.parameters import Parameters
from serving.protocols.oip.repository import index, is_ready, load, unload
from serving.protocols.oip.tensors import Tensor
from serving.requests.ask import ask
from serving.requests.context import Here, server_version
from serving.requests.deadlines import in_time, seconds_of
from serving.requests.routes import BytesBehind, JSONRoute, TimedRoute

router = APIRouter(prefix="/v2", tags=["open inference protocol"], responses=INFERENCE_ERRORS)

EXAMPLES = {
    "texts": {
        "value": {
            "id": "42",
            "inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["one text", "another"]}],
            "outputs": [{"name": "label"}, {"name": "score"}],
            "parameters": {"truncate": True, "timeout": 500000},
        }
    },
    "names in a text, as JSON": {
        "value": {
            "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Anna plays chess."]}],
            "outputs": [{"name": "json"}],
            "parameters": {"aggregation": "first"},
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


class OutputParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    binary_data: StrictBool | None = None
    """Send it as bytes behind the JSON."""
    classification: Literal[0] | None = None


class RequestedOutput(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: ModelName
    parameters: OutputParameters | None = None


class InputParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    binary_data: Literal[False] | None = None
    binary_data_size: Annotated[Int64, Field(ge=0)] | None = None
    """Bytes of the tensor behind the JSON."""


class InputTensor(BaseModel):
    """``data`` is flat in row-major order, or nested as ``shape`` says; or its bytes stand behind the JSON."""

    model_config = ConfigDict(extra="forbid")
    name: ModelName
    shape: Many[Int64]
    datatype: ModelName
    parameters: InputParameters | None = None
    data: list[Any] | None = None

    @property
    def bytes(self) -> int | None:
        return self.parameters.binary_data_size if self.parameters is not None else None

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if (self.data is None) == (self.bytes is None):
            raise ValueError("expected data, or binary_data_size and so many bytes behind the JSON")
        return self


class OutputTensor(BaseModel):
    """``data`` is flat in row-major order; without it, the tensor's bytes stand behind the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, int] | None = None
    data: list[Any] | None = None


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


class IndexRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ready: StrictBool = False
    """None while the server is not ready."""


class IndexedModel(BaseModel):
    name: str
    version: str
    state: str
    reason: str


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parameters: dict[Text, Any] = {}


class UnloadParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    unload_dependents: StrictBool = False
    """Sent by Triton's clients; no task depends on another."""


class UnloadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parameters: UnloadParameters | None = None


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
    return ServerMetadata(name="jpets", version=server_version(), extensions=list(EXTENSIONS))


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
    return ModelMetadata.model_validate((await find_model(here, model, version)).metadata)


@router.get("/models/{model}/ready", response_model=ModelReady, summary="Is a task loaded?")
@router.get("/models/{model}/versions/{version}/ready", response_model=ModelReady, summary="Is a version loaded?")
async def model_ready(here: Here, model: str, version: str | None = None) -> FastJSONResponse:
    able = await is_ready(here, model, version)
    return FastJSONResponse({"name": model, "ready": able}, 200 if able else 503)


async def repository_index(here: Here, body: IndexRequest | None = None) -> FastJSONResponse:
    """All tasks and backbones; tasks that are not on the device come with their next query."""
    return FastJSONResponse(await index(here, ready=body is not None and body.ready))


async def repository_load(request: Request, here: Here, model: str, body: LoadRequest | None = None) -> Response:
    """Answers once the task is on the device, or no slot is free there."""
    await load(here, model, body.parameters if body is not None else {}, seconds_of(request, here.settings))
    return Response()


async def repository_unload(here: Here, model: str, body: UnloadRequest | None = None) -> Response:
    """The task leaves the device, once its queries there are answered; its next query brings it again."""
    del body
    await unload(here, model)
    return Response()


for path, endpoint, model, summary in (
    ("/repository/index", repository_index, list[IndexedModel], "Which tasks and backbones there are"),
    ("/repository/models/{model}/load", repository_load, None, "Bring a task to the device"),
    ("/repository/models/{model}/unload", repository_unload, None, "Make a task leave the device"),
):
    router.add_api_route(
        path, endpoint, methods=["POST"], response_model=model, summary=summary, route_class_override=JSONRoute
    )


async def infer(
    request: Request,
    here: Here,
    model: str,
    body: Annotated[InferRequest, Body(openapi_examples=EXAMPLES)],
    version: str | None = None,
    behind: BytesBehind = b"",
) -> Response:
    """Inputs: `text` and maybe `text_pair` (BYTES, [N]), or `input_ids` and maybe `attention_mask` (padding on the
    right only) and `token_type_ids` (INT64, [N, L]); ids include the special tokens.

    Outputs by head: `logits`, `label`, `score`, `probs`, and of a multi-label head `labels`, a JSON list of those over
    their thresholds, each with its `label` and `score`; regression `logits`, `score`; tokens `logits`, `label`, `score`
    for each token (an empty label and the score 0 for special tokens), padded to the longest, with `lengths`; question
    answering (`text` is the question, `text_pair` the context) `logits` for each token, `start` and `end` (token
    positions, `end` exclusive), `score`, and `answer`, which is empty where token ids were sent, with `lengths`;
    embedding heads and the backbone `embedding`; fill-mask heads the best `token` of each mask, its `text` and `score`,
    with `lengths`, the number of masks; a group of students also `students`, how many of them made each answer. A
    `score` of a regression is its first value, or its sigmoid where the only one stands for that. The first row that
    fails, fails the request.

    Every task that does not embed has the output `json` too, where it is asked for by name: each row's answer as
    `POST /v1/classify` has it, with entities, answers and their characters, shaped by the parameters `top_k` and
    `aggregation`. With `windows`, and `json` alone, it is that of a whole text that is longer than the task takes.
    `dimensions` shortens embeddings.

    The backbone's model asks other tasks too: with an input `task` (BYTES, [N]) each row is for the task of its name,
    or, of a single row, all tasks are asked about it and share the layers in which none of them differs. Outputs are
    then `answer` (JSON, as `POST /v1/fanout` has it; a task that fails has its error there) and `shared_layers`.

    Tensors may also come and go as raw bytes behind the JSON, whose length is then in the header
    `Inference-Header-Content-Length` (the binary tensor data extension): `parameters.binary_data_size` of an input,
    `parameters.binary_data` of a wanted output or `parameters.binary_data_output` of the request. An answer is packed
    if `Accept-Encoding` is `gzip` or `deflate` and nothing else.
    """
    given, requested = body.parameters or Parameters(), body.outputs
    seconds = seconds_of(request, here.settings, None if given.timeout is None else given.timeout / 1e6)
    found = await in_time(here, seconds, find_model(here, model, version))
    names = [each.name for each in requested or ()] or None  # none named: all, as over gRPC
    inference = Inference(_tensors(body.inputs, behind), names, given)
    asked = await in_time(here, seconds, read_inference(here, found, inference))
    raw = {name: bool(given.binary_data_output) for name in asked.wanted}
    for each in requested or ():
        if each.parameters is not None and each.parameters.binary_data is not None:
            raw[each.name] = each.parameters.binary_data

    def respond(results: Sequence[Result]) -> Mapping[str, Any] | Response:
        outputs, after = binary.outputs_of(asked.arrays(results), raw)
        answer: dict[str, Any] = {"model_name": model, "model_version": asked.version(results)}
        if body.id is not None:
            answer["id"] = body.id
        content = {**answer, "outputs": outputs}
        return binary.response(content, after) if after else content

    response = await ask(request, here, asked.queries, respond, seconds)
    coding = binary.coding_of(request.headers.get("accept-encoding", ""))
    if coding is None:
        return response
    return await here.aside.do(len(response.body), partial(binary.packed, response, coding))


def _tensors(given: Sequence[InputTensor], behind: bytes) -> list[Tensor]:
    """Those without data have theirs in ``behind``, one after the other."""
    found, at, raw = [], 0, memoryview(behind)
    for each in given:
        data: Sequence[Any] | memoryview = each.data or ()
        if each.bytes is not None:
            data = raw[at : at + each.bytes]
            at += each.bytes
        found.append(Tensor(each.name, each.datatype, each.shape, data))
    if at != len(behind):
        raise InvalidInput(f"inputs: expected {at} bytes behind the JSON, found {len(behind)}")
    return found


for path, summary in (
    ("/models/{model}/infer", "Ask a task"),
    ("/models/{model}/versions/{version}/infer", "Ask a version of a task"),
):
    router.add_api_route(
        path, infer, methods=["POST"], response_model=InferResponse, summary=summary, route_class_override=TimedRoute
    )
