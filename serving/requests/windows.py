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


async def in_windows(
    here: Context,
    task: Task,
    queries: Sequence[Query],
    size: int | None = None,
    stride: int | None = None,
) -> list[Cut]:
    """The windows of each query's text, or of its pair's second one (a question's context), which hold ``size`` tokens,
    by default as many as the task takes, and share ``stride`` of them.

    Raises ``InvalidInput``, ``InputTooLong``, ``OverQuota``, and ``TooLarge`` as soon as there are more windows than a
    request may have inputs.
    """

    def cut_all() -> list[Cut]:
        found: list[Cut] = []
        for query in queries:
            made = sum(len(own.queries) for own in found)
            found.append(_cut(here, task, query, size, stride, most - made))
        return found

    here.asker.allowance.check(queries)
    most = here.settings.max_inputs
    effort = sum(len(query.text or "") + len(query.text_pair or "") for query in queries)
    return await here.aside.do(effort, cut_all)


def _cut(here: Context, task: Task, query: Query, size: int | None, stride: int | None, most: int) -> Cut:
    """Blocks for as long as tokenising takes."""
    passage = task.head.type == "question-answering"
    with here.services.owning(here.named(task.id)) as own:
        longest = own.longest(task)
        size = min(longest, size or (USUAL if passage else longest))
        shared = min(size // 2, USUAL_STRIDE) if stride is None else stride
        tokens = own.text.windows(query, task.preprocessing, size, shared, passage=passage, most=most)
    queries = [
        Query(task.id, input_ids=own.ids.tolist(), token_type_ids=own.types.tolist() if own.types.any() else None)
        for own in tokens
    ]
    return Cut(tokens, queries)
