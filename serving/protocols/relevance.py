"""How well texts answer to a query, by tasks with one output for a pair (cross-encoders)."""

from __future__ import annotations

from collections.abc import Sequence

from jpets.engine.results.numbers import sigmoid
from jpets.errors import InvalidInput, Saturated
from jpets.types import FloatArray, Result, Task
from serving.protocols.results import scored
from serving.requests.answers import REPLACED
from serving.requests.context import Context


async def scoring_task(here: Context, name: str) -> Task:
    """Raises ``NotFound``, ``InvalidInput`` for a task that gives no score."""
    found = await here.find(name)
    if found is None or found.head.type != "sequence-classification" or found.head.outputs != 1:
        kind = "no head" if found is None else f"a {found.head.type} head with {found.head.outputs} outputs"
        raise InvalidInput(f"{name[:128]!r} has {kind}; texts are ranked by a task with one output for a pair")
    return found


def relevances(results: Sequence[Result], *, raw: bool) -> list[float]:
    """The score of each pair: a probability, or the ``raw`` output. Raises ``Saturated``."""
    return [float(logit if raw else sigmoid(logit)) for logit in _logits(results)]


def best_first(results: Sequence[Result]) -> list[int]:
    """The places of pairs, the highest output first, which tells apart what are equal probabilities in 32 bits; equal
    ones stay in their order. Raises ``Saturated``."""
    logits = _logits(results)
    return sorted(range(len(logits)), key=lambda at: -logits[at])


def _logits(results: Sequence[Result]) -> list[FloatArray]:
    found = scored(results)
    if any(len(result.logits) != 1 for result in found):
        raise Saturated(REPLACED)
    return [result.logits[0] for result in found]
