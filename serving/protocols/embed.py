"""``/v2/embed`` and ``/v1/embed``: embeddings as Cohere has them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from jpets.types import Embedding, Query, Result, Side, Task
from serving.http.errors import INFERENCE_ERRORS
from serving.http.fields import Int64, Many, ModelName, Text
from serving.protocols.classify import usage
from serving.protocols.embeddings import check_dimensions, embedding_task, encoded
from serving.protocols.results import all_of, shortened
from serving.protocols.token_limits import cut_all
from serving.requests.ask import ask, check_count
from serving.requests.context import Context, Here
from serving.requests.deadlines import before_deadline
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)
InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64"]
Truncate = Literal["NONE", "START", "END"]
MOST_TYPES = 16
"""Names of types in a request."""
EXAMPLES = {
    "documents": {"value": {"model": "all-minilm", "texts": ["a text", "another"], "input_type": "search_document"}}
}
PROMPTS: Mapping[InputType, Sequence[str]] = {
    "search_document": ("search_document", "document", "passage", "corpus"),
    "search_query": ("search_query", "query"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Names that models have for the prompt of a use, of which the first that there is counts."""
SIDES: Mapping[Truncate | None, bool | Side] = {"NONE": False, "START": "left", "END": "right", None: True}


class EmbedRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: ModelName
    texts: Many[Text]
    input_type: InputType | None = None
    """What the vectors are for: the model's prompt for that, if it has one, stands before each text."""
    embedding_types: Annotated[Many[EmbeddingType], Field(min_length=1, max_length=MOST_TYPES)] | None = None
    """``float`` by default."""
    truncate: Truncate | None = None
    """Where texts that are too long are cut, if not refused; by default where the model's texts are cut, mostly
    ``END``."""
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    """Most tokens of a text, where the model takes more; a prompt is not counted."""
    output_dimension: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the first numbers of each vector, with the length that the whole one had: of use for models that were
    trained so (matryoshka)."""


class Version(BaseModel):
    version: str


class BilledUnits(BaseModel):
    input_tokens: int


class Meta(BaseModel):
    api_version: Version
    billed_units: BilledUnits


class EmbedResponse(BaseModel):
    """``embeddings`` are lists of vectors by type. Under ``/v1``, where no types are named, they are one list."""

    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    id: str
    embeddings: dict[EmbeddingType, list[list[float] | str]] | list[list[float]]
    texts: list[str]
    meta: Meta


@router.post(
    "/v2/embed", response_model=EmbedResponse, responses=INFERENCE_ERRORS, summary="Embed texts, as Cohere does"
)
async def embed(
    request: Request, here: Here, body: Annotated[EmbedRequest, Body(openapi_examples=EXAMPLES)]
) -> Response:
    """`model` is the backbone's name or a task with an embedding head, as for `POST /v1/embeddings`."""
    return await _embedded(request, here, body, "2", body.embedding_types or ["float"])


@router.post("/v1/embed", response_model=EmbedResponse, summary="The same in Cohere's earlier shape")
async def embed_plainly(
    request: Request, here: Here, body: Annotated[EmbedRequest, Body(openapi_examples=EXAMPLES)]
) -> Response:
    """As `POST /v2/embed`, but without `embedding_types` the answer's `embeddings` are a plain list of vectors."""
    return await _embedded(request, here, body, "1", body.embedding_types)


async def _embedded(
    request: Request, here: Context, body: EmbedRequest, version: str, types: Sequence[EmbeddingType] | None
) -> Response:
    task = await embedding_task(here, body.model)
    check_count(len(body.texts), here)
    check_dimensions(here, body.model, task, body.output_dimension, "output_dimension")
    name, truncate = task.id if task is not None else None, SIDES[body.truncate]
    texts = body.texts
    if body.max_tokens is not None:
        cutting = cut_all(here, name, texts, "max_tokens", body.max_tokens, truncate)
        texts = await before_deadline(request, here, cutting)

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        vectors = [shortened(own.embedding, body.output_dimension) for own in all_of(results, Embedding)]
        meta = {"api_version": {"version": version}, "billed_units": {"input_tokens": usage(results)["total_tokens"]}}
        by_type = {kind: [encoded(each, kind) for each in vectors] for kind in dict.fromkeys(types or ["float"])}
        return {
            "response_type": "embeddings_floats" if types is None else "embeddings_by_type",
            "id": f"embed-{uuid.uuid4().hex}",
            "embeddings": by_type["float"] if types is None else by_type,
            "texts": body.texts,
            "meta": meta,
        }

    prompt = _prompt(here, task, body.input_type)
    return await ask(request, here, [Query(name, text, truncate=truncate, prompt=prompt) for text in texts], respond)


def _prompt(here: Context, task: Task | None, use: InputType | None) -> str | None:
    """The name of the model's prompt for a use; None for the one that it has by default."""
    rule = here.services.first.backbone.embeds.preprocessing if task is None else task.preprocessing
    known = rule.prompts or {}
    return next((name for name in PROMPTS[use] if name in known), None) if use is not None else None
