"""``POST /v1/classify``: texts to labels and probabilities, in vLLM's shape; also any mixture of tasks at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from jpets.errors import InvalidInput
from jpets.types import Query, Result
from serving.answers import render, render_error
from serving.ask import ask, check_count, raise_first_error
from serving.context import Context, Here
from serving.fields import ModelName, Text
from serving.responses import FastJSONResponse
from serving.routes import InferenceRoute
from serving.schemas import ClassifyResponse

router = APIRouter(tags=["inference"], route_class=InferenceRoute)

EXAMPLES = {
    "one task": {"value": {"model": "sentiment", "input": ["what a lovely day", "never again"], "top_k": 2}},
    "any mixture of tasks": {
        "value": {
            "inputs": [
                {"model": "sentiment", "text": "what a lovely day"},
                {"model": "paraphrase", "text": "it rains", "text_pair": "rain is falling"},
                {"model": "questions", "text": "Who plays?", "text_pair": "Anna and her brother play chess."},
                {"model": None, "text": "embedded by the plain backbone"},
            ]
        }
    },
}


class MixedInput(BaseModel):
    """One text for one task; without ``model`` the plain backbone embeds it."""

    model_config = ConfigDict(extra="forbid")
    model: ModelName | None = None
    text: Text
    text_pair: Text | None = None


class ClassifyRequest(BaseModel):
    """Either ``model`` and ``input``, or ``inputs``, in which each text names its own task."""

    model_config = ConfigDict(extra="forbid")
    model: ModelName | None = None
    input: Text | list[Text] | None = None
    inputs: list[MixedInput] | None = None
    top_k: Annotated[StrictInt, Field(ge=1)] | None = None
    """Adds the best ``top_k`` labels with their probabilities."""
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        single = self.model is not None and self.input is not None and self.inputs is None
        mixed = self.inputs is not None and self.model is None and self.input is None
        if not (single or mixed):
            raise ValueError("send either model and input, or inputs")
        return self


@router.post("/v1/classify", response_model=ClassifyResponse, summary="Classify texts, by one task or by many at once")
async def classify(
    request: Request, here: Here, body: Annotated[ClassifyRequest, Body(openapi_examples=EXAMPLES)]
) -> FastJSONResponse:
    """One task: `model` and `input`; the first text that fails, fails the request.

    Any mixture of tasks: `inputs`; they share device batches, and a text that fails has an `error` in its place.

    Single-label heads answer with the softmax `probs`; multi-label heads with sigmoid `probs` and the `labels` over
    their thresholds; regression heads with `values`; token heads with `entities` (token positions, `end` exclusive);
    question-answering heads (`text` is the question, `text_pair` the context) with the `answer`, its `score` and where
    in the context it stands (`start` and `end` in characters, `end` exclusive); embedding heads and the plain backbone,
    in a mixture, with `embedding`.
    """
    if body.inputs is not None:
        check_count(len(body.inputs), here)
        queries = [
            Query(_task_id(each.model, here), each.text, each.text_pair, truncate=body.truncate) for each in body.inputs
        ]
        results = await ask(request, here, queries)
        data = [
            {"index": index, "model": each.model, **_outcome(result, body.top_k)}
            for index, (each, result) in enumerate(zip(body.inputs, results, strict=True))
        ]
        return FastJSONResponse(_response(None, data, results))
    assert body.model is not None and body.input is not None
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_count(len(texts), here)
    task = await here.find(body.model)
    if task is None or task.head.type == "embedding":
        raise InvalidInput(f"{body.model[:128]!r} gives embeddings, not labels; ask POST /v1/embeddings")
    results = await ask(request, here, [Query(body.model, text, truncate=body.truncate) for text in texts])
    raise_first_error(results)
    data = [{"index": index, **render(result, body.top_k)} for index, result in enumerate(results)]
    return FastJSONResponse(_response(body.model, data, results))


def usage(results: Sequence[Result]) -> dict[str, int]:
    tokens = sum(result.tokens for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _outcome(result: Result, top_k: int | None) -> dict[str, Any]:
    if result.error is not None:
        return render_error(result.error)
    return render(result, top_k)


def _task_id(model: str | None, here: Context) -> str | None:
    """None, the plain backbone, also where it is asked by its name."""
    return None if model == here.service.backbone.name and not here.service.knows(model) else model


def _response(model: str | None, data: list[dict[str, Any]], results: Sequence[Result]) -> dict[str, Any]:
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage(results),
    }
