"""``POST /pooling``: vLLM's route for the plain numbers of any head."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from jpets.engine.results.numbers import sigmoid, softmax
from jpets.errors import InvalidInput, Saturated
from jpets.types import Classification, Embedding, FloatArray, HeadType, Regression, Result, Tokens
from serving.http.fields import Int64, ModelName, Text
from serving.protocols.classify import usage
from serving.protocols.embeddings import Inputs, check_dimensions, encoded, queries_of
from serving.protocols.results import shortened
from serving.protocols.schemas import Usage
from serving.protocols.token_limits import PromptTokens, bounded
from serving.requests.answers import REPLACED
from serving.requests.ask import ask, raise_first_error
from serving.requests.context import Here
from serving.requests.deadlines import before_deadline
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)
PoolingTask = Literal["embed", "classify", "token_classify"]
TASKS: Mapping[HeadType, PoolingTask] = {
    "embedding": "embed",
    "sequence-classification": "classify",
    "token-classification": "token_classify",
}
KINDS: Mapping[PoolingTask, tuple[type[Result], ...]] = {
    "embed": (Embedding,),
    "classify": (Classification, Regression),
    "token_classify": (Tokens,),
}
EXAMPLE = {"model": "sentiment", "input": ["what a lovely day", "never again"]}


class PoolingRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: ModelName
    input: Inputs
    task: PoolingTask | None = None
    """What the head does, which is the default."""
    use_activation: StrictBool | None = None
    """False: outputs of a classifier as they are, not as probabilities, as which they are given by default. Not for
    embeddings."""
    encoding_format: Literal["float", "base64"] | None = None
    """``float`` by default."""
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the first numbers of each embedding."""
    user: Text | None = None
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule. Token ids are never cut."""
    truncate_prompt_tokens: PromptTokens | None = None
    """Cut each text to so many tokens, special ones included; -1: to those that the task takes."""


class PoolingItem(BaseModel):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[list[float]] | list[float] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingItem]
    usage: Usage


@router.post("/pooling", response_model=PoolingResponse, summary="The numbers that a head makes of texts")
async def pooling(
    request: Request, here: Here, body: Annotated[PoolingRequest, Body(openapi_examples={"usual": {"value": EXAMPLE}})]
) -> Response:
    """An embedding's vector; a classifier's probability of each label, or its outputs; for labelled tokens such a list
    for each token, special tokens included."""
    task = await here.find(body.model)
    head: HeadType = "embedding" if task is None else task.head.type
    expected = TASKS.get(head)
    if expected is None:
        raise InvalidInput(f"{body.model!r} has a {head} head; ask POST /v1/classify")
    if body.task not in (None, expected):
        raise InvalidInput(f"task: {body.model!r} has a {head} head, so expected {expected}, found {body.task}")
    if expected == "embed":
        check_dimensions(here, body.model, task, body.dimensions)
        if body.use_activation is not None:
            raise InvalidInput("use_activation: vectors have none; leave it out")
    elif body.dimensions is not None:
        raise InvalidInput("dimensions: only vectors can be shortened; leave it out")
    name, (truncate, most) = task.id if task is not None else None, bounded(body.truncate_prompt_tokens, body.truncate)
    reading = queries_of(here, body.input, name, truncate=truncate, max_length=most)
    queries = await before_deadline(request, here, reading)

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        raise_first_error(results)
        if not all(isinstance(result, KINDS[expected]) for result in results):
            raise Saturated(REPLACED)
        activated = body.use_activation is not False
        numbers = [_numbers(result, body.dimensions, activated=activated) for result in results]
        data = [
            {"object": "pooling", "index": index, "data": encoded(each, body.encoding_format)}
            for index, each in enumerate(numbers)
        ]
        made = {"id": f"pool-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": body.model}
        return {**made, "data": data, "usage": usage(results)}

    return await ask(request, here, queries, respond)


def _numbers(result: Result, kept: int | None, *, activated: bool) -> FloatArray:
    """``activated``: probabilities of labels, and of a value that stands for one; other values are as they are."""
    if isinstance(result, Embedding):
        return shortened(result.embedding, kept)
    if isinstance(result, Classification):
        return result.probs if activated else result.logits
    if isinstance(result, Tokens):
        return softmax(result.logits) if activated else result.logits
    assert isinstance(result, Regression)
    return sigmoid(result.logits) if activated and result.is_score else result.logits
