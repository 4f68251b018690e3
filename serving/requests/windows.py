"""Texts that are longer than a model takes, as several queries that overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jpets.tokenizing import Tokens
from jpets.types import Query, Task
from serving.requests.context import Context

USUAL, USUAL_STRIDE = 384, 128
"""Most tokens of a question's window, and those that neighbours share, as ``transformers`` has them; at most half."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A text's windows: ``tokens`` say where each one's stand in it, ``queries`` ask for them by their ids."""

    tokens: Sequence[Tokens]
    queries: list[Query]


def cut(
    here: Context, task: Task, query: Query, size: int | None = None, stride: int | None = None, *, passage: bool
) -> Cut:
    """The windows of a query's text, or of its pair's second one, which hold ``size`` tokens, by default as many as the
    task takes, and share ``stride`` of them. ``passage``: of a question's context.

    Blocks for as long as tokenising takes. Raises ``InvalidInput``, ``InputTooLong``, also for more windows than a
    request may have inputs.
    """
    with here.services.owning(here.named(task.id)) as own:
        longest = own.longest(task)
        size = min(longest, size or (USUAL if passage else longest))
        shared = min(size // 2, USUAL_STRIDE) if stride is None else stride
        most = here.settings.max_inputs
        tokens = own.text.windows(query, task.preprocessing, size, shared, passage=passage, most=most)
    queries = [
        Query(task.id, input_ids=own.ids.tolist(), token_type_ids=own.types.tolist() if own.types.any() else None)
        for own in tokens
    ]
    return Cut(tokens, queries)
