"""What several protocols read of a request's results, each to give it a shape of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from jpets.engine.results.numbers import normalized
from jpets.errors import InvalidInput, Saturated
from jpets.types import Classification, Embedding, FloatArray, Regression, Result, Side, Task
from serving.requests.answers import REPLACED, UNNAMED
from serving.requests.ask import raise_first_error
from serving.requests.context import Context

Kind = TypeVar("Kind", bound=Result)


def all_of(results: Sequence[Result], kind: type[Kind]) -> list[Kind]:
    """The results, each of this kind. Raises the first one's error, and ``Saturated`` where the task was replaced by
    one with another head meanwhile."""
    return _each(results, [result for result in results if isinstance(result, kind)])


def scored(results: Sequence[Result]) -> list[Classification | Regression]:
    """``all_of``, of heads that have outputs for a whole text."""
    return _each(results, [result for result in results if isinstance(result, (Classification, Regression))])


def _each(results: Sequence[Result], found: list[Kind]) -> list[Kind]:
    raise_first_error(results)
    if len(found) < len(results):
        raise Saturated(REPLACED)
    return found


def class_names(result: Classification | Regression) -> Sequence[str]:
    """The names of a head's outputs; those without one as ``transformers`` calls them."""
    return result.names or [UNNAMED.format(at) for at in range(len(result.logits))]


def ranked(names: Sequence[str], scores: FloatArray) -> list[dict[str, Any]]:
    """Labels with their scores, the best first; equal ones stay in their order."""
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"label": names[at], "score": float(scores[at])} for at in order]


def check_length(here: Context, task: Task | None, unit: bool | None) -> None:
    """Raises ``InvalidInput`` where vectors should keep the length that they have, not ``unit``, and the head, or the
    plain backbone, makes it 1."""
    scaled = here.services.first.backbone.embeds.normalize if task is None else task.head.normalize
    if unit is False and scaled:
        whose = "this backbone's" if task is None else "this task's"
        raise InvalidInput(f"normalize: {whose} vectors have the length 1; leave it out")


async def cut_where(here: Context, task: Task | None, truncate: bool | None, wanted: str | None) -> bool | Side | None:
    """``Query.truncate`` for a client that says whether texts are cut, on the ``wanted`` side. Raises ``InvalidInput``
    where it names another side than the model's and leaves it to the model whether they are cut."""
    if wanted is None or truncate is False:
        return truncate
    side: Side = "left" if wanted.lower() == "left" else "right"
    if truncate:
        return side
    own = (await here.encoder(None if task is None else task.id)).side
    if side != own:
        raise InvalidInput(
            f"truncation_direction: this model's texts are cut on the {own}; send truncate: true for the {side}, or "
            "leave it out"
        )
    return None


def vectors_of(results: Sequence[Result], unit: bool | None) -> list[FloatArray]:
    """The embeddings, of length 1 if they are to be ``unit`` ones."""
    vectors = (result.embedding for result in all_of(results, Embedding))
    return [np.ascontiguousarray(normalized(vector) if unit else vector) for vector in vectors]


def shortened(vector: FloatArray, kept: int | None) -> FloatArray:
    """The first numbers of a vector, by default all, with the length of the whole."""
    if kept is None or kept >= len(vector):
        return vector
    return normalized(vector[:kept]) * np.float32(np.linalg.norm(vector))
