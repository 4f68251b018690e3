"""``POST /v1/classify``: texts to labels and probabilities, in vLLM's shape; also any mixture of tasks at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, Self

from fastapi import APIRouter, Body, Request, Response
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from jpets.errors import InvalidInput
from jpets.types import Aggregation, Query, Result, Task
from serving.http.errors import worded
from serving.http.fields import MOST_MODEL, Int64, Many, ModelName, Text, is_unicode
from serving.http.responses import FastJSONResponse
from serving.protocols.head_options import check_options
from serving.protocols.long_texts import check_windows, render_windows
from serving.protocols.schemas import ClassifyResponse
from serving.protocols.token_limits import PromptTokens, bounded
from serving.requests.answers import Render, outcomes, render, render_error
from serving.requests.ask import ask, check_count, raise_first_error
from serving.requests.context import Context, Here
from serving.requests.deadlines import before_deadline
from serving.requests.routes import JSONRoute
from serving.requests.windows import in_windows

router = APIRouter(tags=["inference"], route_class=JSONRoute)

EXAMPLES = {
    "one task": {"value": {"model": "sentiment", "input": ["what a lovely day", "never again"], "top_k": 2}},
    "pairs": {"value": {"model": "paraphrase", "input": [["it rains", "rain is falling"]]}},
    "one text, several tasks": {"value": {"tasks": ["sentiment", "topic"], "input": "what a lovely day"}},
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
    prompt_name: Text | None = None
    """Which of the model's prompts stands before the text."""


class WrongInput(NamedTuple):
    """What is wrong with one of several inputs; it is reported in that input's place. ``model`` as far as it could be
    read."""

    model: str | None
    problem: InvalidInput


def _or_wrong(given: object, check: ValidatorFunctionWrapHandler) -> MixedInput | WrongInput:
    if not isinstance(given, (dict, MixedInput)):
        return NO_INPUT
    try:
        return check(given)
    except ValidationError as error:
        model = given.get("model") if isinstance(given, dict) else None
        known = model if isinstance(model, str) and len(model) <= MOST_MODEL and is_unicode(model) else None
        return WrongInput(known, InvalidInput(worded(error.errors(include_url=False, include_input=False))))


NO_INPUT = WrongInput(
    None, InvalidInput("expected an object with a text and maybe a model, a text_pair and a prompt_name")
)


Pair = Annotated[Many[Text], Field(min_length=2, max_length=2)]


FORMS = ({"model", "input"}, {"tasks", "input"}, {"inputs"})


class ClassifyRequest(BaseModel):
    """Either ``model`` and ``input``, texts or pairs of them; or ``tasks`` and ``input``, one text or pair for all of
    them; or ``inputs``, in which each text names its own task."""

    model_config = ConfigDict(extra="forbid")
    model: ModelName | None = None
    tasks: Many[ModelName] | None = None
    input: Text | Many[Text] | Many[Pair] | None = None
    inputs: Many[Annotated[MixedInput, WrapValidator(_or_wrong)]] | None = None
    top_k: Annotated[Int64, Field(ge=1)] | None = None
    """Adds the best ``top_k`` labels with their probabilities."""
    aggregation: Aggregation | None = None
    """How labelled tokens become entities: each alone (`none`), neighbours of one label (`simple`, the default), or
    words, labelled by their first token, their mean or their surest token (`first`, `average`, `max`)."""
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule."""
    truncate_prompt_tokens: PromptTokens | None = None
    """With ``model``: cut each text or pair to so many tokens, special ones included; -1: to those that the task
    takes."""
    use_activation: StrictBool | None = None
    """With ``model``: false gives the head's outputs as they are in the place of ``probs`` and ``score``."""
    windows: StrictBool | None = None
    """With ``model``: read texts, or the contexts of questions, that are longer than the task takes in overlapping
    windows, and answer for each whole: by mean probabilities or values, all entities, or the best answer."""
    user: Text | None = None
    """Accepted because OpenAI's and vLLM's clients send it; it changes nothing."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = {name for name in ("model", "tasks", "input", "inputs") if getattr(self, name) is not None}
        if given not in FORMS:
            raise ValueError("send either model and input, or tasks and input, or inputs")
        if self.tasks is not None and not (isinstance(self.input, str) or len(self.input or ()) == 1):
            raise ValueError("with tasks, send one text or pair as input")
        of_one_task = self.use_activation, self.truncate_prompt_tokens
        if self.model is None and of_one_task != (None, None):
            raise ValueError("use_activation and truncate_prompt_tokens: send model and input")
        if self.windows and (self.model is None or self.truncate or of_one_task != (None, None)):
            raise ValueError(
                "windows: send model and input, without truncate, truncate_prompt_tokens and use_activation"
            )
        return self


@router.post("/v1/classify", response_model=ClassifyResponse, summary="Classify texts, by one task or by many at once")
async def classify(
    request: Request, here: Here, body: Annotated[ClassifyRequest, Body(openapi_examples=EXAMPLES)]
) -> Response:
    """One task: `model` and `input`; the first text that fails, fails the request.

    Any mixture of tasks: `inputs`; they share device batches, and a text that fails has an `error` in its place.

    One text for several tasks: `tasks` and `input`, answered as a mixture. The lower layers on which none of the tasks
    differs from the backbone are computed once where that takes less time; then the tasks that shared them have
    `shared_layers`, how many.

    Single-label heads answer with the softmax `probs`; multi-label heads with sigmoid `probs` and the `labels` over
    their thresholds; regression heads with `values`, and where the only one stands for its sigmoid, with a `label` and
    that `score`; token heads with `entities` and where they stand (characters);
    question-answering heads (`text` is the question, `text_pair` the context) with the `answer`, its `score` and where
    in the context it stands (`start` and `end` in characters, `end` exclusive); fill-mask heads with the `fills` of
    each mask, `top_k` of them (5); embedding heads and the plain backbone, in a mixture, with `embedding`.
    """
    activated = body.use_activation is not False
    rendered = partial(render, top_k=body.top_k, how=body.aggregation or "simple", activated=activated)
    if body.inputs is not None:
        return await mixed(request, here, body.inputs, rendered, body.truncate)
    assert body.input is not None
    if body.tasks is not None:
        text, pair = _pair(body.input if isinstance(body.input, str) else body.input[0])
        inputs = of_each(here, body.tasks, text, pair)
        return await mixed(request, here, inputs, rendered, body.truncate)
    assert body.model is not None
    model, texts = body.model, [body.input] if isinstance(body.input, str) else body.input
    check_count(len(texts), here)
    task = await here.find(model)
    if task is None or task.head.type == "embedding":
        raise InvalidInput(f"{model[:128]!r} gives embeddings, not labels; ask POST /v1/embeddings")
    check_options(task, body.top_k, body.aggregation, body.use_activation)
    if body.windows:
        return await _in_windows(request, here, task, [_pair(text) for text in texts], body)

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        raise_first_error(results)
        data = [{"index": index, **rendered(result)} for index, result in enumerate(results)]
        return _response(model, data, results)

    truncate, most = bounded(body.truncate_prompt_tokens, body.truncate)
    queries = [Query(model, text, pair, truncate=truncate, max_length=most) for text, pair in map(_pair, texts)]
    return await ask(request, here, queries, respond)


async def _in_windows(
    request: Request, here: Context, task: Task, texts: Sequence[tuple[str, str | None]], body: ClassifyRequest
) -> Response:
    asked = [Query(task.id, text, pair) for text, pair in texts]
    check_windows(task, asked)
    windows = await before_deadline(request, here, in_windows(here, task, asked))
    queries = [query for own in windows for query in own.queries]
    how = body.aggregation or "simple"

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        wholes = render_windows(task, windows, results, body.top_k, how)
        return _response(task.id, [{"index": at, **whole} for at, whole in enumerate(wholes)], results)

    return await ask(request, here, queries, respond)


def _pair(given: str | Sequence[str]) -> tuple[str, str | None]:
    return (given, None) if isinstance(given, str) else (given[0], given[1])


def of_each(here: Context, tasks: Sequence[str], text: str, pair: str | None) -> list[MixedInput]:
    """One text for each of some tasks, all of which were checked already: checking the text anew for each would take
    long. Raises ``TooLarge``, ``InvalidInput``."""
    check_count(len(tasks), here)
    return [MixedInput.model_construct(model=task, text=text, text_pair=pair) for task in tasks]


async def mixed(
    request: Request, here: Context, inputs: Sequence[MixedInput | WrongInput], rendered: Render, truncate: bool | None
) -> Response:
    """Each text by its own task; an error of one is told in its place."""
    check_count(len(inputs), here)

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        left = iter(outcomes(results, rendered))
        data = [
            {
                "index": index,
                "model": each.model,
                **(render_error(each.problem) if isinstance(each, WrongInput) else next(left)),
            }
            for index, each in enumerate(inputs)
        ]
        return _response(None, data, results)

    queries = [
        Query(here.task_id(each.model), each.text, each.text_pair, truncate=truncate, prompt=each.prompt_name)
        for each in inputs
        if isinstance(each, MixedInput)
    ]
    return await ask(request, here, queries, respond) if queries else FastJSONResponse(respond([]))


def usage(results: Sequence[Result]) -> dict[str, int]:
    tokens = sum(result.tokens for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _response(model: str | None, data: list[dict[str, Any]], results: Sequence[Result]) -> dict[str, Any]:
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage(results),
    }
