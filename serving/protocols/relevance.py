"""How well texts answer to a query, by tasks with one output for a pair (cross-encoders)."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.engine.results.numbers import sigmoid
from jpets.errors import InvalidInput, Saturated
from jpets.types import Result, Task
from serving.protocols.oip.outputs import REPLACED
from serving.protocols.results import scored
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
