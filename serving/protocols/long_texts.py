"""One answer for a text that was read in overlapping windows, because it is longer than its task takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from jpets.engine.results.entities import IGNORED, aggregated, of_windows
from jpets.engine.results.numbers import sigmoid
from jpets.engine.results.results import DEFAULT_THRESHOLD
from jpets.errors import InvalidInput, Saturated
from jpets.spans import best_span
from jpets.types import Aggregation, Classification, Entity, Query, Regression, Result, Span, Task, Tokens
from serving.protocols.results import all_of, scored
from serving.requests.answers import REPLACED, render
from serving.requests.windows import Cut


def check_windows(task: Task, queries: Sequence[Query]) -> None:
    """Raises ``InvalidInput`` where a task's texts cannot be read in windows."""
    if task.head.type == "question-answering" and not all(query.text_pair for query in queries):
        raise InvalidInput("windows: a question needs a text that has its answer; send pairs of a question and a text")
    if task.head.type == "fill-mask":
        raise InvalidInput("windows: words for masks are not put together of windows; send shorter texts without it")


def render_windows(
    task: Task, texts: Sequence[Cut], results: Sequence[Result], top_k: int | None, how: Aggregation
) -> list[dict[str, Any]]:
    """``render`` of each text; ``results`` are those of all its windows, one text's after the other's. Raises the
    first window's error, and ``Saturated``."""
    left = iter(results)
    return [_render_whole(task, own, [next(left) for _ in own.tokens], top_k, how) for own in texts]


def _render_whole(
    task: Task, windows: Cut, results: Sequence[Result], top_k: int | None, how: Aggregation
) -> dict[str, Any]:
    if task.head.type == "question-answering":
        return best_answer(windows, all_of(results, Span))
    if task.head.type == "token-classification":
        tagged = all_of(results, Tokens)
        found = entities_of(windows, tagged, how)
        whole = len(windows.tokens) == 1  # else an entity's tokens are counted in its window
        entities = [dataclasses.asdict(each) | ({} if whole else {"tokens": None}) for each in found]
        return {"entities": entities, "num_classes": len(tagged[0].names)}
    return render(averaged(task, scored(results)), top_k)


def averaged(task: Task, results: Sequence[Classification | Regression]) -> Classification | Regression:
    """The mean of the windows' probabilities, or of their values, each counted by its tokens. Of a group of students it
    says the fewest that made one of them. Raises ``Saturated`` where the task was replaced meanwhile."""
    if len({result.logits.shape for result in results}) > 1 or len({result.names for result in results}) > 1:
        raise Saturated(REPLACED)
    made = [result.students for result in results if result.students is not None]
    first = dataclasses.replace(results[0], students=min(made, default=None))
    tokens = [result.tokens for result in results]
    if isinstance(first, Regression):
        values = np.average([result.logits for result in results], axis=0, weights=tokens).astype(np.float32)
        scores = sigmoid(values) if first.is_score else values
        return dataclasses.replace(first, logits=values, score=float(scores[0]))
    probs = np.average(
        [result.probs for result in results if isinstance(result, Classification)], axis=0, weights=tokens
    ).astype(np.float32)
    limits = task.preprocessing.thresholds or (DEFAULT_THRESHOLD,) * len(probs)
    if len(limits) != len(probs):
        raise Saturated(REPLACED)
    over = [name for name, p, limit in zip(first.names, probs, limits, strict=True) if p >= limit]
    best = int(probs.argmax())
    return dataclasses.replace(
        first,
        probs=probs,
        label=first.names[best],
        score=float(probs[best]),
        labels=tuple(over) if first.multi_label else (),
    )


def entities_of(
    windows: Cut,
    tagged: Sequence[Tokens],
    how: Aggregation,
    ignored: Set[str] = IGNORED,
    *,
    cut: bool = False,
) -> Sequence[Entity]:
    """``aggregated`` over windows; of entities of neighbouring ones that overlap, the longer one stays."""
    parts = [
        aggregated(dataclasses.replace(result, spelling=tokens.spelling), how, ignored, anew=True, cut=cut)
        for tokens, result in zip(windows.tokens, tagged, strict=True)
    ]
    return of_windows(parts) if len(parts) > 1 else parts[0]


def best_answer(windows: Cut, spans: Sequence[Span]) -> dict[str, Any]:
    """The best answer over all windows of a question's context."""
    found: list[dict[str, Any]] = []
    for tokens, result in zip(windows.tokens, spans, strict=True):
        assert tokens.passage is not None
        start, end, score = best_span(result.logits, tokens.passage)
        answer = tokens.passage.answer(start, end)
        assert answer is not None
        found.append({"answer": answer.text, "score": score, "start": answer.start, "end": answer.end})
    return max(found, key=lambda each: float(each["score"]))
