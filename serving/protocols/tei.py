"""``/tei/{task}/...``: the routes of Hugging Face's text-embeddings-inference, for one task each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from jpets.engine.results.numbers import sigmoid
from jpets.errors import InvalidInput
from jpets.types import Classification, FloatArray, Pooling, Query, Regression, Result, Task
from serving.http.fields import Int64, Many, Side, Text
from serving.http.responses import FastJSONResponse
from serving.protocols.embeddings import check_dimensions
from serving.protocols.relevance import best_first, relevances, scoring_task
from serving.protocols.results import check_length, class_names, cut_where, ranked, scored, shortened, vectors_of
from serving.requests.answers import UNNAMED
from serving.requests.ask import ask, check_count
from serving.requests.context import Here, server_version
from serving.requests.routes import JSONRoute

router = APIRouter(prefix="/tei/{task}", tags=["inference"], route_class=JSONRoute)

Sequences = Annotated[Many[Text], Field(min_length=1, max_length=2)]
"""A text, or a pair."""


class EmbedRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inputs: Text | Many[Text]
    normalize: StrictBool | None = None
    """True by default: vectors have the length 1."""
    truncate: StrictBool | None = None
    truncation_direction: Side | None = None
    prompt_name: Text | None = None
    """Which of the model's prompts stands before each text."""
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the first numbers of each vector, with the length that the whole one had."""


class PredictRequest(BaseModel):
    """``inputs``: a text, a pair as a list of two, or a list of such lists, each with its own answer."""

    model_config = ConfigDict(extra="forbid")
    inputs: Text | Sequences | Many[Sequences]
    raw_scores: StrictBool = False
    truncate: StrictBool | None = None
    truncation_direction: Side | None = None


class RankRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    query: Text
    texts: Many[Text]
    raw_scores: StrictBool = False
    return_text: StrictBool = False
    truncate: StrictBool | None = None
    truncation_direction: Side | None = None


@router.post("/embed", response_model=None, summary="Embed texts, as text-embeddings-inference does")
async def embed(request: Request, here: Here, task: str, body: Annotated[EmbedRequest, Body()]) -> Response:
    """For a task with an embedding head, or the backbone's own name: a vector for each text."""
    found = await here.find(task)
    if found is not None and found.head.type != "embedding":
        raise InvalidInput(f"{task[:128]!r} has a {found.head.type} head, which embeds nothing; ask /predict")
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_count(len(texts), here)
    unit = body.normalize is not False
    check_length(here, found, unit)
    check_dimensions(here, task, found, body.dimensions)
    truncate = await cut_where(here, found, body.truncate, body.truncation_direction)
    name = found.id if found else None
    queries = [Query(name, text, truncate=truncate, prompt=body.prompt_name) for text in texts]

    def respond(results: Sequence[Result]) -> list[FloatArray]:
        return [shortened(vector, body.dimensions) for vector in vectors_of(results, unit)]

    return await ask(request, here, queries, respond)


@router.post("/predict", response_model=None, summary="Classify texts, as text-embeddings-inference does")
async def predict(request: Request, here: Here, task: str, body: Annotated[PredictRequest, Body()]) -> Response:
    """For a head with classes: all of them with their scores, the best first."""
    found = await here.find(task)
    if found is None or found.head.type != "sequence-classification":
        kind = "no head" if found is None else f"a {found.head.type} head"
        raise InvalidInput(f"{task[:128]!r} has {kind}, which has no classes; ask a task that classifies texts")
    given = body.inputs
    several = not isinstance(given, str) and not (given and isinstance(given[0], str))
    sequences: Sequence[Any] = given if several else [[given] if isinstance(given, str) else given]
    check_count(len(sequences), here)
    truncate = await cut_where(here, found, body.truncate, body.truncation_direction)
    queries = [Query(found.id, own[0], own[1] if len(own) > 1 else None, truncate=truncate) for own in sequences]

    def respond(results: Sequence[Result]) -> list[Any]:
        found = scored(results)
        each = [ranked(class_names(result), _scores(result, raw=body.raw_scores)) for result in found]
        return each if several else each[0]

    return await ask(request, here, queries, respond)


def _scores(result: Classification | Regression, *, raw: bool) -> FloatArray:
    if raw:
        return result.logits
    return result.probs if isinstance(result, Classification) else sigmoid(result.logits)


@router.post("/rerank", response_model=None, summary="Rank texts by a query, as text-embeddings-inference does")
async def rerank(request: Request, here: Here, task: str, body: Annotated[RankRequest, Body()]) -> Response:
    """For a task with one output for a pair of texts: its sigmoid, or with `raw_scores` the output itself."""
    check_count(len(body.texts), here)
    found = await scoring_task(here, task)
    truncate = await cut_where(here, found, body.truncate, body.truncation_direction)

    def respond(results: Sequence[Result]) -> list[dict[str, Any]]:
        scores = relevances(results, raw=body.raw_scores)
        ranked: list[dict[str, Any]] = [{"index": at, "score": scores[at]} for at in best_first(results)]
        return [{**each, "text": body.texts[each["index"]]} for each in ranked] if body.return_text else ranked

    return await ask(
        request, here, [Query(found.id, body.query, text, truncate=truncate) for text in body.texts], respond
    )


async def info(here: Here, task: str) -> FastJSONResponse:
    """What kind of model it is, and how long its texts may be."""
    found = await here.find(task)
    with here.services.owning(here.named(task)) as own:
        longest = own.longest(found)
    return FastJSONResponse(
        {
            "model_id": task,
            "model_type": _type(found, here.services.first.backbone.embeds.pooling),
            "max_input_length": longest,
            "max_client_batch_size": here.settings.max_inputs,
            "version": server_version(),
        }
    )


def _type(task: Task | None, plain: Pooling) -> dict[str, Any]:
    """``plain`` is how the backbone embeds texts."""
    if task is None or task.head.type == "embedding":
        return {"embedding": {"pooling": plain if task is None else task.head.pooling}}
    if task.head.type != "sequence-classification":
        raise InvalidInput(f"{task.id!r} has a {task.head.type} head, which text-embeddings-inference does not have")
    names = task.labels or tuple(UNNAMED.format(at) for at in range(task.head.outputs))
    if task.head.outputs == 1:
        return {"reranker": {"id2label": {"0": names[0]}, "label2id": {names[0]: 0}}}
    return {"classifier": {"id2label": {str(at): name for at, name in enumerate(names)},
                           "label2id": {name: at for at, name in enumerate(names)}}}  # fmt: skip


router.add_api_route(
    "/info",
    info,
    methods=["GET"],
    response_model=None,
    summary="A task, as text-embeddings-inference shows its model",
    route_class_override=APIRoute,  # it has no body
)
