"""``POST /hf/{task}``: what ``huggingface_hub.InferenceClient(model=URL)`` sends, for every head that can answer it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from jpets.errors import InvalidInput
from jpets.types import Aggregation, Query, Task
from serving.http.fields import Int64, Many, Side, Text
from serving.protocols.huggingface_answers import KINDS, Asked, Kind
from serving.protocols.results import check_length, cut_where
from serving.requests.ask import ask, check_count
from serving.requests.context import Here
from serving.requests.deadlines import before_deadline
from serving.requests.routes import JSONRoute
from serving.requests.windows import in_windows

router = APIRouter(tags=["inference"], route_class=JSONRoute)

EXAMPLES = {
    "a text": {"value": {"inputs": "a chess engine", "parameters": {"top_k": 2}}},
    "a pair of texts": {"value": {"inputs": {"text": "it rains", "text_pair": "rain is falling"}}},
    "names in a text": {"value": {"inputs": "Anna plays chess.", "parameters": {"aggregation_strategy": "first"}}},
    "a question": {"value": {"inputs": {"question": "Who plays?", "context": "Anna and her brother play chess."}}},
    "a word for a mask": {"value": {"inputs": "The [MASK] plays chess.", "parameters": {"top_k": 3}}},
    "how alike texts are": {"value": {"inputs": {"source_sentence": "a game", "sentences": ["chess", "soup"]}}},
    "labels of one's own": {"value": {"inputs": "a game", "parameters": {"candidate_labels": ["play", "food"]}}},
}


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: Text
    context: Text


class Similar(BaseModel):
    model_config = ConfigDict(extra="forbid")
    source_sentence: Text
    sentences: Many[Text]


class TextPair(BaseModel):
    """As ``transformers``' pipeline for text classification takes it."""

    model_config = ConfigDict(extra="forbid")
    text: Text
    text_pair: Text | None = None


class Options(BaseModel):
    """Of Hugging Face's former service. Without effect: a model is always there, and so are earlier answers."""

    model_config = ConfigDict(extra="forbid")
    wait_for_model: StrictBool | None = None
    use_cache: StrictBool | None = None


class Parameters(BaseModel):
    """The client's names. Each kind of answer takes some of them."""

    model_config = ConfigDict(extra="forbid")
    top_k: Annotated[Int64, Field(ge=1)] | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    aggregation_strategy: Aggregation | None = None
    ignore_labels: Many[Text] | None = None
    candidate_labels: Many[Text] | None = None
    hypothesis_template: Text | None = None
    multi_label: StrictBool | None = None
    targets: Text | Many[Text] | None = None
    """Words among which a mask's is; of one that is no token its first one counts."""
    stride: Annotated[Int64, Field(ge=0)] | None = None
    """Tokens that windows of a text share which is longer than the model takes; without it such a text is refused."""
    doc_stride: Annotated[Int64, Field(ge=0)] | None = None
    """The same of a question's context, which is always read in windows."""
    max_seq_len: Annotated[Int64, Field(ge=1)] | None = None
    """Most tokens of a window."""
    max_answer_len: Annotated[Int64, Field(ge=1)] | None = None
    handle_impossible_answer: StrictBool | None = None
    """Whether an empty text may be the answer."""
    max_question_len: Annotated[Int64, Field(ge=1)] | None = None
    """Without effect: the pipeline cuts no question either where its tokenizer is a fast one."""
    align_to_words: StrictBool | None = None
    """Whether answers are of whole words, which they are unless told otherwise."""
    normalize: StrictBool | None = None
    truncate: StrictBool | None = None
    truncation_direction: Side | None = None
    prompt_name: Text | None = None
    """Which of the model's prompts stands before each text."""


class HuggingFaceRequest(BaseModel):
    """What stands beside ``inputs`` is sent so where the client embeds texts."""

    model_config = ConfigDict(extra="forbid")
    inputs: Question | Similar | TextPair | Text | Many[Text] | Many[TextPair]
    parameters: Parameters | None = None
    options: Options | None = None
    normalize: StrictBool | None = None
    truncate: StrictBool | None = None
    truncation_direction: Side | None = None
    prompt_name: Text | None = None
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the first numbers of each vector, with the length that the whole one had."""
    encoding_format: Literal["float"] | None = None

    def told(self) -> dict[str, Any]:
        """All parameters that were given."""
        own = self.parameters.model_dump(exclude_none=True) if self.parameters is not None else {}
        return {**own, **self.model_dump(exclude={"inputs", "options", "parameters"}, exclude_none=True)}


@router.post("/hf/{task}", response_model=None, summary="Ask a task as Hugging Face's client does")
async def answer(
    request: Request, here: Here, task: str, body: Annotated[HuggingFaceRequest, Body(openapi_examples=EXAMPLES)]
) -> Response:
    """For `InferenceClient(model="http://.../hf/TASK")`: `text_classification` (also of pairs, objects with `text` and
    `text_pair`), `zero_shot_classification` (a head with a label `entailment`), `token_classification`,
    `question_answering`, `fill_mask`, `feature_extraction` and `sentence_similarity` (a head for embeddings, or the
    backbone's own name).
    """
    found = await here.find(task)
    told = body.told()
    name = _kind(found, body, told, task)
    kind = KINDS[name]
    if refused := sorted(told.keys() - kind.takes):
        raise InvalidInput(f"parameters.{refused[0]}: {name} takes {sorted(kind.takes)}; leave it out")
    if name == "feature_extraction":
        check_length(here, found, told.get("normalize"))
        told["truncate"] = await cut_where(here, found, told.get("truncate"), told.get("truncation_direction"))
    asked = _asked(found, body, told)
    check_count(max(len(asked.texts), len(told.get("candidate_labels", ()))), here)
    if kind.passage is None or (name == "token_classification" and "stride" not in told):
        return await ask(request, here, kind.queries(asked), lambda results: kind.respond(asked, results))
    assert found is not None
    if "stride" in told and "truncate" in told:
        raise InvalidInput("parameters.truncate: with a stride texts are read in windows, not cut; leave one out")
    if told.get("aggregation_strategy") == "none":
        raise InvalidInput("parameters.stride: windows are put together by entities; choose an aggregation_strategy")
    stride = told.get("doc_stride" if kind.passage else "stride")
    texts = [Query(found.id, text, asked.context) for text in asked.texts]
    cutting = in_windows(here, found, texts, told.get("max_seq_len"), stride)
    windows = await before_deadline(request, here, cutting)
    queries = [query for own in windows for query in own.queries]
    return await ask(request, here, queries, lambda results: kind.respond(asked, results, windows))


def _asked(task: Task | None, body: HuggingFaceRequest, told: Mapping[str, Any]) -> Asked:
    given = body.inputs
    if isinstance(given, Question):
        return Asked(task, [given.question], given.context, told)
    if isinstance(given, Similar):
        return Asked(task, [given.source_sentence, *given.sentences], None, told)
    each = given if isinstance(given, list) else [given]
    texts = [own if isinstance(own, str) else own.text for own in each]
    pairs = [None if isinstance(own, str) else own.text_pair for own in each]
    return Asked(task, texts, None, told, alone=not isinstance(given, list), pairs=pairs)


def _kind(task: Task | None, body: HuggingFaceRequest, told: Mapping[str, Any], name: str) -> Kind:
    """Which of the client's methods was called, of those that the task's head can answer. Raises ``InvalidInput``."""
    head = "embedding" if task is None else task.head.type
    given = body.inputs
    if isinstance(given, Question):
        wanted: Kind = "question_answering"
    elif isinstance(given, Similar):
        wanted = "sentence_similarity"
    elif "candidate_labels" in told:
        wanted = "zero_shot_classification"
    else:
        wanted = BY_HEAD.get(head, "question_answering")
    if KINDS[wanted].head != head:
        kind = "no head" if task is None else f"a {head} head"
        raise InvalidInput(f"{name[:128]!r} has {kind}, which {wanted} cannot use; ask another task, or another method")
    if _are_pairs(given) and wanted != "text_classification":
        raise InvalidInput(f"inputs: {wanted} takes no pairs of text and text_pair; send texts")
    if wanted == "question_answering" and not isinstance(given, Question):
        raise InvalidInput(f"inputs: {name[:128]!r} answers questions; send an object with a question and a context")
    return wanted


def _are_pairs(given: Any) -> bool:
    return any(isinstance(own, TextPair) for own in (given[:1] if isinstance(given, list) else [given]))


BY_HEAD: Mapping[str, Kind] = {
    "sequence-classification": "text_classification",
    "token-classification": "token_classification",
    "embedding": "feature_extraction",
    "fill-mask": "fill_mask",
}
