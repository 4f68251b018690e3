"""Results as JSON, the same over HTTP and in the files of offline runs."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from jpets.engine.results.entities import aggregated
from jpets.engine.results.fills import best_fills
from jpets.errors import JpetsError
from jpets.types import Aggregation, Classification, Embedding, Fills, Regression, Result, Span, Tokens
from serving.http.errors import is_failure, log_failure, numbered

Render = Callable[[Result], dict[str, Any]]
REPLACED = "the task was replaced while this request ran; send it again"
UNNAMED = "LABEL_{}"
"""An output without a name, as ``transformers`` calls it."""


def render(
    result: Result, top_k: int | None = None, how: Aggregation = "simple", *, activated: bool = True
) -> dict[str, Any]:
    """A result without an error, as JSON; that of a group says how many students made it. ``how`` makes entities of
    labelled tokens. Not ``activated``: outputs of a head stand in the place of probabilities."""
    item = _render(result, top_k, how, activated=activated)
    return item if result.students is None else {**item, "students": result.students}


def _render(result: Result, top_k: int | None, how: Aggregation, *, activated: bool) -> dict[str, Any]:
    if isinstance(result, Classification):
        probs: list[float] = (result.probs if activated else result.logits).tolist()
        item: dict[str, Any] = {"label": result.label, "probs": probs, "num_classes": len(probs)}
        if top_k is not None:
            best = sorted(zip(item["probs"], result.names, strict=True), key=lambda pair: -pair[0])[:top_k]
            item["top"] = [{"label": label, "prob": prob} for prob, label in best]
        return {**item, "labels": list(result.labels)} if result.multi_label else item
    if isinstance(result, Regression):
        return _values(result, activated=activated)
    if isinstance(result, Tokens):
        found = [dataclasses.asdict(each) for each in aggregated(result, how)]
        return {"entities": found, "num_classes": len(result.names)}
    if isinstance(result, Span):
        if (answer := result.answer) is None:  # asked by ids: there is no text to count characters in
            return {"answer": "", "score": result.score, "tokens": [result.start, result.end]}
        return {"answer": answer.text, "score": result.score, "start": answer.start, "end": answer.end}
    if isinstance(result, Fills):
        return {"fills": [[each._asdict() for each in own] for own in best_fills(result, top_k)]}
    assert isinstance(result, Embedding)
    return {"embedding": result.embedding.tolist()}


def _values(result: Regression, *, activated: bool) -> dict[str, Any]:
    """``values`` are a head's outputs as they are; ``probs`` too, unless the only one stands for its sigmoid."""
    values: list[float] = result.logits.tolist()
    if not result.is_score:
        label = result.names[values.index(max(values))] if result.names else None
        return {"label": label, "values": values, "probs": values, "num_classes": len(values)}
    label = result.names[0] if result.names else UNNAMED.format(0)
    score = result.score if activated else values[0]
    return {"label": label, "score": score, "values": values, "probs": [score], "num_classes": 1}


def outcomes(results: Sequence[Result], rendered: Render) -> list[dict[str, Any]]:
    """What stands for each of several tasks: its answer, ``rendered``, and how many layers it shared with others; or
    its error. A failure of this server is in the log too, by the number that its message ends with."""
    failures = {each.error.code: each.error for each in results if each.error is not None and is_failure(each.error)}
    number = uuid.uuid4().hex if failures else ""
    for failed in failures.values():  # one line a kind: a batch that fails may have been all tasks' batch
        log_failure(failed, number)
    return [_outcome(each, rendered, number) for each in results]


def _outcome(result: Result, rendered: Render, number: str) -> dict[str, Any]:
    if (problem := result.error) is not None:
        return render_error(type(problem)(numbered(problem, number)) if is_failure(problem) else problem)
    try:
        item = rendered(result)
    except JpetsError as error:  # of an option that suits other tasks' heads
        return render_error(error)
    shared = shared_layers(result)
    return {**item, "shared_layers": shared} if shared else item


def shared_layers(result: Result) -> int:
    return result.timing.shared_layers if result.timing is not None else 0


def render_error(error: JpetsError) -> dict[str, Any]:
    """The JSON that stands in place of a result."""
    return {"error": {"code": error.code, "message": error.message}}
