"""``POST /hf/{task}``: what ``huggingface_hub.InferenceClient(model=URL)`` sends. So far questions only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict

from jpets.errors import InvalidInput, Saturated
from jpets.types import Query, Result, Span
from serving.http.fields import Text
from serving.http.responses import FastJSONResponse
from serving.protocols.answers import render
from serving.protocols.oip_tensors import REPLACED
from serving.requests.ask import ask, raise_first_error
from serving.requests.context import Here
from serving.requests.routes import JSONRoute

router = APIRouter(tags=["inference"], route_class=JSONRoute)

EXAMPLES = {
    "a question": {"value": {"inputs": {"question": "Who plays?", "context": "Anna and her brother play chess."}}}
}


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: Text
    context: Text


class QuestionParameters(BaseModel):
    """The client's names for how answers are made here anyway; anything else is refused."""

    model_config = ConfigDict(extra="forbid")
    align_to_words: Literal[False] | None = None
    handle_impossible_answer: Literal[False] | None = None
    top_k: Literal[1] | None = None


class QuestionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inputs: Question
    parameters: QuestionParameters | None = None


class QuestionAnswer(BaseModel):
    """``start`` and ``end`` (exclusive) are characters of the context."""

    answer: str
    score: float
    start: int
    end: int


@router.post("/hf/{task}", response_model=QuestionAnswer, summary="Answer a question, as Hugging Face's client asks it")
async def answer(
    request: Request, here: Here, task: str, body: Annotated[QuestionRequest, Body(openapi_examples=EXAMPLES)]
) -> FastJSONResponse:
    """For `InferenceClient(model="http://.../hf/TASK").question_answering(question, context)`; the task's head must be
    one for question answering. An answer may begin or end within a word.
    """
    found = await here.find(task)
    if found is None or found.head.type != "question-answering":
        kind = "no head" if found is None else f"a {found.head.type} head"
        raise InvalidInput(f"{task[:128]!r} has {kind}, which answers no questions; ask POST /v1/classify")

    def respond(results: Sequence[Result]) -> dict[str, Any]:
        raise_first_error(results)
        if not isinstance(results[0], Span):
            raise Saturated(REPLACED)
        return render(results[0])

    return await ask(request, here, [Query(found.id, body.inputs.question, body.inputs.context)], respond)
