"""The engine's queries for queries of groups: one for each student that answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from jpets.engine.students.group import Group
from jpets.engine.tasks.student_names import MARK
from jpets.errors import Saturated, TooLarge
from jpets.types import Query, Result

Send = Callable[[Sequence[Query]], list[Future[Result]]]


def parts_of(query: Query, group: Group | None, answering: int) -> list[Query]:
    """The engine's queries for one query. Its names of students are no tasks of a user."""
    if group is not None:
        return group.queries(query, answering)
    hidden = isinstance(query.task, str) and MARK in query.task
    return [dataclasses.replace(query, task=f"{query.task}{MARK}") if hidden else query]


def sent(parts: Sequence[list[Query]], groups: Sequence[Group | None], send: Send) -> list[Future[Result]]:
    """Where the queue has no room for all students, it may have some for the first ones: ``parts`` are cut to as many
    as it has room for. Raises ``Saturated``, ``TooLarge``."""
    while True:
        try:
            return send([one for own in parts for one in own])
        except (Saturated, TooLarge):
            least = [1 if group is None else group.least for group in groups]
            count = max((len(own) for own, few in zip(parts, least, strict=True) if len(own) > few), default=1) - 1
            if not count:
                raise
            for own, few in zip(parts, least, strict=True):
                del own[max(count, few) :]
