"""``POST /v1/fanout``: one text, many tasks, an answer of each."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from jpets.types import Aggregation
from serving.http.fields import Int64, Many, ModelName, Text
from serving.protocols.classify import mixed, of_each
from serving.protocols.schemas import ClassifyResponse
from serving.requests.answers import render
from serving.requests.context import Here
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)
EXAMPLE = {"tasks": ["sentiment", "topic", "language"], "text": "what a lovely day"}


class FanoutRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tasks: Many[ModelName]
    text: Text
    text_pair: Text | None = None
    top_k: Annotated[Int64, Field(ge=1)] | None = None
    """Adds the best ``top_k`` labels with their probabilities."""
    aggregation: Aggregation = "simple"
    """How labelled tokens become entities, as in ``POST /v1/classify``."""
    truncate: StrictBool | None = None
    """Cut the text if it is too long, whatever the task's own rule."""


@router.post("/v1/fanout", response_model=ClassifyResponse, summary="Ask many tasks about one text")
async def fanout(
    request: Request, here: Here, body: Annotated[FanoutRequest, Body(openapi_examples={"usual": {"value": EXAMPLE}})]
) -> Response:
    """One answer of each task, in order; a task that fails has an `error` in its place.

    Layers below all of the tasks' deltas are computed once for the text, where that is predicted to take less time:
    the answers of the tasks that shared them have `shared_layers`, how many.
    """
    inputs = of_each(here, body.tasks, body.text, body.text_pair)
    return await mixed(request, here, inputs, partial(render, top_k=body.top_k, how=body.aggregation), body.truncate)
