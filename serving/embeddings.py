"""``POST /v1/embeddings``: OpenAI's shape, for the plain backbone and for tasks with an embedding head."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt

from jpets.errors import InvalidInput
from jpets.types import Embedding, FloatArray, Query
from serving.ask import ask, check_count, raise_first_error
from serving.classify import usage
from serving.context import Here
from serving.fields import ModelName, Text
from serving.responses import FastJSONResponse
from serving.routes import InferenceRoute
from serving.schemas import Usage

router = APIRouter(tags=["inference"], route_class=InferenceRoute)

EXAMPLES = {
    "texts": {"value": {"model": "all-minilm", "input": ["a text", "another one"]}},
    "token ids": {"value": {"model": "all-minilm", "input": [101, 2023, 102], "encoding_format": "base64"}},
}


class EmbeddingsRequest(BaseModel):
    """``input``: one text, texts, the token ids of one text, or of several; ids include the special tokens."""

    model_config = ConfigDict(extra="forbid")
    model: ModelName
    input: Text | list[Text] | list[StrictInt] | list[list[StrictInt]]
    encoding_format: Literal["float", "base64"] = "float"
    user: Text | None = None
    """Accepted because OpenAI clients send it; it changes nothing."""
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule. Token ids are never cut."""


class EmbeddingItem(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: Usage


@router.post("/v1/embeddings", response_model=EmbeddingsResponse, summary="Embed texts")
async def embeddings(
    request: Request, here: Here, body: Annotated[EmbeddingsRequest, Body(openapi_examples=EXAMPLES)]
) -> FastJSONResponse:
    """`model` is the backbone's name (mean over the tokens, normalised) or a task with an embedding head.

    `base64` holds little-endian 32-bit floats.
    """
    task = await here.find(body.model)
    if task is not None and task.head.type != "embedding":
        raise InvalidInput(f"{body.model!r} has a {task.head.type} head; ask POST /v1/classify")
    inputs = _inputs(body.input)
    check_count(len(inputs), here)
    id = task.id if task else None
    queries = [
        Query(id, text=each, truncate=body.truncate) if isinstance(each, str) else Query(id, input_ids=each)
        for each in inputs
    ]
    results = await ask(request, here, queries)
    raise_first_error(results)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(result.embedding, body.encoding_format)}
        for index, result in enumerate(results)
        if isinstance(result, Embedding)
    ]
    return FastJSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage(results)})


def _inputs(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | Sequence[int]]:
    """One entry a text: a flat list of numbers is one text's token ids."""
    if isinstance(given, str):
        return [given]
    numbers = [each for each in given if isinstance(each, int)]
    return [numbers] if numbers else [each for each in given if not isinstance(each, int)]


def _encoded(vector: FloatArray, how: str) -> Any:
    if how == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return np.ascontiguousarray(vector)
