"""``POST /v1/embeddings``: OpenAI's shape, for the plain backbone and for tasks with an embedding head."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from jpets.errors import InvalidInput
from jpets.types import Embedding, FloatArray, Query, Result, Task
from serving.http.fields import Int64, Many, ModelName, Text
from serving.protocols.classify import usage
from serving.protocols.results import all_of, shortened
from serving.protocols.schemas import Usage
from serving.protocols.token_limits import PromptTokens, bounded
from serving.requests.ask import ask, check_count
from serving.requests.context import Context, Here
from serving.requests.deadlines import before_deadline
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)

EXAMPLES = {
    "texts": {"value": {"model": "all-minilm", "input": ["a text", "another one"]}},
    "token ids": {"value": {"model": "all-minilm", "input": [101, 2023, 102], "encoding_format": "base64"}},
}


Inputs = Text | Many[Text] | Many[StrictInt] | Many[Many[StrictInt]]
"""One text, texts, the token ids of one text, or of several; ids include the special tokens, and begin with the model's
first one where it has any."""


class EmbeddingsRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: ModelName
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    """``float`` by default."""
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the first numbers of each vector, with the length that the whole one had: of use for models that were
    trained so (matryoshka)."""
    user: Text | None = None
    """Accepted because OpenAI clients send it; it changes nothing."""
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule. Token ids are never cut."""
    truncate_prompt_tokens: PromptTokens | None = None
    """vLLM's name: cut each text to so many tokens, special ones included; -1: to those that the task takes."""
    prompt_name: Text | None = None
    """Which of the model's prompts stands before each text; `jpets task check` and `jpets backbone show` list them."""


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
) -> Response:
    """`model` is the backbone's name or a task with an embedding head. A backbone embeds as its Sentence-Transformers
    settings say; without any by the mean over the tokens, normalised.

    `base64` holds little-endian 32-bit floats.
    """
    task = await embedding_task(here, body.model)
    check_dimensions(here, body.model, task, body.dimensions)
    name = task.id if task is not None else None
    truncate, most = bounded(body.truncate_prompt_tokens, body.truncate)
    reading = queries_of(here, body.input, name, truncate=truncate, max_length=most, prompt=body.prompt_name)
    queries = await before_deadline(request, here, reading)

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": encoded(shortened(result.embedding, body.dimensions), body.encoding_format),
            }
            for index, result in enumerate(all_of(results, Embedding))
        ]
        return {"object": "list", "data": data, "model": body.model, "usage": usage(results)}

    return await ask(request, here, queries, respond)


async def queries_of(
    here: Context,
    given: Any,
    task: str | None,
    *,
    truncate: bool | None,
    max_length: int | None = None,
    prompt: str | None = None,
) -> list[Query]:
    """Queries for ``Inputs``. Raises ``TooLarge``, ``InvalidInput``."""
    inputs = _inputs(given)
    check_count(len(inputs), here)
    await _check_first(here, [each[0] for each in inputs if not isinstance(each, str) and each], task)
    numbers = sum(len(each) for each in inputs if not isinstance(each, str))
    return await here.aside.do(numbers, partial(_queries, inputs, task, truncate, max_length, prompt))


async def embedding_task(here: Context, model: str) -> Task | None:
    """The task that embeds texts, None for the plain backbone. Raises ``NotFound``, ``InvalidInput`` for one that does
    something else."""
    task = await here.find(model)
    if task is not None and task.head.type != "embedding":
        raise InvalidInput(f"{model!r} has a {task.head.type} head; ask POST /v1/classify")
    return task


def check_dimensions(
    here: Context, model: str, task: Task | None, asked: int | None, option: str = "dimensions"
) -> None:
    """Raises ``InvalidInput`` for more numbers of a vector than there are; ``option`` asks for them."""
    size = task.vector_size if task is not None else here.services.first.backbone.config.hidden_size
    if asked is not None and asked > size:
        raise InvalidInput(f"{option}: {model!r} gives {size}, found {asked}; ask for as many or fewer")


async def _check_first(here: Context, found: Sequence[int], task: str | None) -> None:
    """Raises ``InvalidInput`` where token ids begin otherwise than the model's. A client that tokenises for a model of
    OpenAI's sends ids that are other tokens here, whose vectors would mean nothing."""
    if not found:
        return
    first = (await here.encoder(task)).tokenizer.encode("").ids[:1]
    other = next((id for id in found if [id] != first), None)
    if first and other is not None:
        raise InvalidInput(
            f"input: this model's token ids begin with {first[0]}, found {other}; send texts (in LangChain: "
            "check_embedding_ctx_length=False), or ids of this model with its special tokens"
        )


def _inputs(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> Sequence[Any]:
    """One entry a text, or its token ids: a flat list of numbers is one text's."""
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


def _queries(
    inputs: Sequence[str | Sequence[int]],
    task: str | None,
    truncate: bool | None,
    max_length: int | None,
    prompt: str | None,
) -> list[Query]:
    try:
        return [
            Query(task, text=each, truncate=truncate, max_length=max_length, prompt=prompt)
            if isinstance(each, str)
            else Query(task, input_ids=array("q", each), max_length=max_length, prompt=prompt)
            for each in inputs
        ]
    except OverflowError as error:
        raise InvalidInput("input: expected 64-bit integers, found one beyond them") from error


def encoded(vector: FloatArray, how: str | None) -> Any:
    """Numbers as JSON has them, or ``base64`` of little-endian 32-bit floats."""
    if how == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return np.ascontiguousarray(vector)
