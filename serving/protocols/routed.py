"""``POST /classify``: vLLM's route, and what semantic routers send: a text without the name of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, StrictBool

from jpets.errors import InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.types import Classification, Query, Result, Tokens
from serving.http.fields import Text
from serving.protocols.classify import ClassifyRequest, classify
from serving.protocols.results import all_of, ranked
from serving.requests.ask import ask
from serving.requests.context import Here
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)

EXAMPLES = {
    "by the server's default task": {"value": {"inputs": "what a lovely day"}},
    "by a task": {"value": {"model": "sentiment", "input": ["what a lovely day"]}},
}

LOOKED_AT = 4096
"""Characters of a part that was cut off in which a token is looked for."""


class RoutedRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inputs: Text
    truncate: StrictBool | None = None


@router.post("/classify", response_model=None, summary="Classify a text by the server's default task, or by any")
async def routed(
    request: Request, here: Here, body: Annotated[RoutedRequest | ClassifyRequest, Body(openapi_examples=EXAMPLES)]
) -> Response:
    """`inputs`: every label of the default task once, the best first; their scores add up to 1. It is the key's, or
    else the server's (`--default-task`). Of a task that labels tokens: `spans`, whose `start` and `end` (exclusive)
    count code points, and `truncated_at`: where a text was cut that is too long (by `truncate`, or the task's own
    rule), else null.
    With `model` and `input` the same as `POST /v1/classify`.
    """
    if isinstance(body, ClassifyRequest):
        return await classify(request, here, body)
    name = here.asker.default_task or here.settings.default_task
    if name is None:
        raise InvalidInput(
            "inputs: no task is named; send model and input, use a key with a default task, or start the server with "
            "--default-task"
        )
    task = await here.find(name)
    if task is not None and task.head.type == "token-classification":
        encoder = await here.encoder(task.id)
        query = Query(task.id, body.inputs, truncate=body.truncate)
        return await ask(request, here, [query], lambda results: _spans(body.inputs, results, encoder))
    if task is None or task.head.type != "sequence-classification" or task.head.problem != "single-label":
        raise InvalidInput(
            f"inputs: the default task {name!r} must give one of several labels, or label tokens, and does neither"
        )

    def respond(results: Sequence[Result]) -> list[dict[str, Any]]:
        (result,) = all_of(results, Classification)
        return ranked(result.names, result.probs)

    return await ask(request, here, [Query(task.id, body.inputs, truncate=body.truncate)], respond)


def _spans(text: str, results: Sequence[Result], encoder: TextEncoder) -> dict[str, Any]:
    (result,) = all_of(results, Tokens)
    spans = [
        {"label": each.label, "score": each.score, "start": each.start, "end": each.end} for each in result.entities
    ]
    return {"spans": spans, "truncated_at": _cut(text, result, encoder)}


def _cut(text: str, result: Tokens, encoder: TextEncoder) -> int | None:
    """The code point where the text's tokens end, or begin where models are cut on the left, if there are some beyond
    it."""
    assert result.spelling is not None
    if (reach := result.spelling.reach()) is None:
        return 0 if _has_tokens(text, encoder) else None
    begin, end = reach
    if _has_tokens(text[end:], encoder):
        return end
    return begin if _has_tokens(text[:begin], encoder) else None


def _has_tokens(text: str, encoder: TextEncoder) -> bool:
    """Some characters, as a byte order mark, are no token: they are not missed."""
    pieces = (text[at : at + LOOKED_AT] for at in range(0, len(text), LOOKED_AT))
    return any(each.strip() and encoder.tokenizer.encode(each, add_special_tokens=False).ids for each in pieces)
