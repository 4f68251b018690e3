"""How well texts answer to a query, by tasks with one output for a pair (cross-encoders)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jpets.engine.results.numbers import sigmoid
from jpets.errors import InvalidInput, Saturated
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query, Result, Task
from serving.protocols.oip.outputs import REPLACED
from serving.protocols.results import scored
from serving.requests.ask import EACH
from serving.requests.context import Context


async def scoring_task(here: Context, name: str) -> Task:
    """Raises ``NotFound``, ``InvalidInput`` for a task that gives no score."""
    found = await here.find(name)
    if found is None or found.head.type != "sequence-classification" or found.head.outputs != 1:
        kind = "no head" if found is None else f"a {found.head.type} head with {found.head.outputs} outputs"
        raise InvalidInput(f"{name[:128]!r} has {kind}; texts are ranked by a task with one output for a pair")
    return found


def relevances(results: Sequence[Result], *, raw: bool) -> list[float]:
    """The score of each pair: a probability, or the ``raw`` output."""
    found = scored(results)
    if any(len(result.logits) != 1 for result in found):
        raise Saturated(REPLACED)
    return [float(result.logits[0] if raw else sigmoid(result.logits)[0]) for result in found]


def best_first(scores: Sequence[float]) -> list[int]:
    """The places of scores, the highest first; equal ones stay in their order."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])


AT_ONCE = 16
"""Documents that are cut in one go."""


async def first_tokens(here: Context, task: Task, texts: Sequence[str], most: int) -> list[str]:
    """Of each text the part that has ``most`` tokens: its beginning, or its end where the model's texts are cut on the
    left. Raises ``InputTooLong``, ``OverQuota``."""
    here.asker.allowance.check([Query(task.id, text) for text in texts])
    encoder = await here.encoder(task.id)
    found: list[str] = []
    for first in range(0, len(texts), AT_ONCE):  # in between it may be given up, and others have their turn
        some = texts[first : first + AT_ONCE]
        effort = sum(EACH + len(text) for text in some)
        found += await here.aside.do(effort, partial(_cut_all, encoder, some, most))
    return found


def _cut_all(encoder: TextEncoder, texts: Sequence[str], most: int) -> list[str]:
    return [cut(encoder, text, most) for text in texts]


def cut(encoder: TextEncoder, text: str, most: int) -> str:
    """The part of a text that has ``most`` tokens; all of it where no model takes as many. Raises ``InputTooLong``."""
    limit = most + encoder.tokenizer.num_special_tokens_to_add(False)
    if limit > encoder.longest or not text.strip():
        return text
    tokens = encoder.encode(Query(None, text, truncate=True), Preprocessing(max_length=limit), spelled=True)
    assert tokens.spelling is not None
    if len(tokens.ids) < limit or (reach := tokens.spelling.reach()) is None:
        return text
    begin, end = reach
    return text[begin:] if encoder.side == "left" else text[:end]
