"""``/v1/rerank`` and ``/v1/score``: pairs of texts by a task with one output, as Cohere, Jina and vLLM have them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool

from jpets.errors import InvalidInput
from jpets.types import Query, Result
from serving.http.errors import INFERENCE_ERRORS
from serving.http.fields import Int64, Many, ModelName, Text
from serving.protocols.classify import usage
from serving.protocols.relevance import best_first, relevances, scoring_task
from serving.protocols.schemas import Usage
from serving.protocols.token_limits import PromptTokens, bounded, cut_all
from serving.requests.ask import ask, check_count
from serving.requests.context import Here
from serving.requests.deadlines import before_deadline
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)

RERANKED = {
    "texts": {
        "value": {"model": "reranker", "query": "a board game", "documents": ["chess", "a soup", "go"], "top_n": 2}
    }
}
SCORED = {"one with several": {"value": {"model": "reranker", "text_1": "a board game", "text_2": ["chess", "soup"]}}}


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: Text


class RerankRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: ModelName
    query: Text
    documents: Many[Text | Document]
    top_n: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the best; all by default."""
    return_documents: StrictBool | None = None
    """Whether the answer repeats the texts."""
    max_tokens_per_doc: Annotated[Int64, Field(ge=1)] | None = None
    """Most tokens of a document that are read; those of pairs that are too long even so are the task's own matter."""
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule."""
    truncate_prompt_tokens: PromptTokens | None = None
    """Cut each pair to so many tokens, special ones included; -1: to those that the task takes."""
    use_activation: StrictBool | None = None
    """False: scores are the output itself, not its sigmoid."""
    user: Text | None = None


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(BaseModel):
    """The best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class ScoreRequest(BaseModel):
    """``text_1`` with each of ``text_2``, or as many of both, pair by pair."""

    model_config = ConfigDict(extra="forbid")
    model: ModelName
    text_1: Annotated[Text | Many[Text], Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Text | Many[Text], Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]
    """vLLM has had several names for both."""
    truncate: StrictBool | None = None
    truncate_prompt_tokens: PromptTokens | None = None
    """Cut each pair to so many tokens, special ones included; -1: to those that the task takes."""
    use_activation: StrictBool | None = None
    """False: scores are the output itself, not its sigmoid."""
    user: Text | None = None


class ScoreItem(BaseModel):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage


async def rerank(
    request: Request, here: Here, body: Annotated[RerankRequest, Body(openapi_examples=RERANKED)]
) -> Response:
    """`model` is a task with one output for a pair of texts. `relevance_score` is its sigmoid, or the output itself
    where the model was made so."""
    check_count(len(body.documents), here)
    task = await scoring_task(here, body.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    most = body.max_tokens_per_doc
    read, (truncate, longest) = texts, bounded(body.truncate_prompt_tokens, body.truncate)
    if most is not None:
        read = await before_deadline(request, here, cut_all(here, task.id, texts, "max_tokens_per_doc", most))
    raw = task.head.relevance == "raw" or body.use_activation is False

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        scores = relevances(results, raw=raw)
        best = best_first(results)[: body.top_n]
        ranked: list[dict[str, Any]] = [{"index": at, "relevance_score": scores[at]} for at in best]
        if body.return_documents:
            ranked = [{**each, "document": {"text": texts[each["index"]]}} for each in ranked]
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "results": ranked, "usage": usage(results)}

    queries = [Query(task.id, body.query, text, truncate=truncate, max_length=longest) for text in read]
    return await ask(request, here, queries, respond)


async def score(request: Request, here: Here, body: Annotated[ScoreRequest, Body(openapi_examples=SCORED)]) -> Response:
    """`model` is a task with one output for a pair of texts; a `score` is its sigmoid, or the output itself where the
    model was made so."""
    pairs = _pairs(body.text_1, body.text_2)
    check_count(len(pairs), here)
    task = await scoring_task(here, body.model)
    raw = task.head.relevance == "raw" or body.use_activation is False

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        scores = relevances(results, raw=raw)
        data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(scores)]
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "data": data,
            "usage": usage(results),
        }

    truncate, most = bounded(body.truncate_prompt_tokens, body.truncate)
    queries = [Query(task.id, first, second, truncate=truncate, max_length=most) for first, second in pairs]
    return await ask(request, here, queries, respond)


def _pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Raises ``InvalidInput``."""
    ones, others = ([own] if isinstance(own, str) else own for own in (first, second))
    if len(ones) == 1:
        return [(ones[0], other) for other in others]
    if len(ones) != len(others):
        raise InvalidInput(
            f"text_1 and text_2: expected one and several, or as many of both, found {len(ones)} and {len(others)}"
        )
    return list(zip(ones, others, strict=True))


for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
    router.add_api_route(
        path, rerank, methods=["POST"], response_model=RerankResponse, summary="Rank texts by a query",
        route_class_override=JSONRoute, responses=INFERENCE_ERRORS if path.startswith("/v2/") else None,
    )  # fmt: skip
for path in ("/v1/score", "/score"):
    router.add_api_route(
        path, score, methods=["POST"], response_model=ScoreResponse, summary="Score pairs of texts",
        route_class_override=JSONRoute,
    )  # fmt: skip
