"""From what lines ask for to their answers, in order, with the engine kept busy."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from jpets.app.commands.offline.input import Asked
from jpets.engine.interface import Serves
from jpets.errors import EngineFailure, JpetsError
from jpets.types import Query, Result
from serving.requests.answers import render, render_error

IN_FLIGHT = 1024
"""Queries, and lines, that are ahead of the oldest answer still missing."""


class _Waiting(NamedTuple):
    line: Asked
    futures: list[Future[Result]]


class Scorer:
    """``engine`` has room for ``IN_FLIGHT`` queries and one of each task."""

    def __init__(self, engine: Serves, *, top_k: int | None, truncate: bool) -> None:
        self._engine = engine
        self._top_k = top_k
        self._truncate = True if truncate else None

    def answers(self, lines: Iterable[Asked]) -> Iterator[dict[str, Any]]:
        """One document a line, in order. Raises ``EngineFailure`` when the engine is no longer live."""
        waiting: deque[_Waiting] = deque()
        ahead = 0
        for line in lines:
            whole = Query(None, line.text, line.text_pair, truncate=self._truncate, prompt=line.prompt)
            queries = [dataclasses.replace(whole, task=task) for task in line.tasks]
            while waiting and (_done(waiting[0]) or ahead + _weight(line) > IN_FLIGHT):
                ahead -= _weight(waiting[0].line)
                yield self._document(waiting.popleft())
            waiting.append(_Waiting(line, self._engine.submit(queries)))
            ahead += _weight(line)
        while waiting:
            yield self._document(waiting.popleft())

    def _document(self, waiting: _Waiting) -> dict[str, Any]:
        line = waiting.line
        head = {"line": line.number, **line.echo}
        if line.error is not None:
            return {**head, **render_error(line.error)}
        answers = [self._answer(self._result(future)) for future in waiting.futures]
        if line.alone:
            return {**head, **answers[0]}
        return {**head, "results": dict(zip(line.tasks, answers, strict=True))}

    def _answer(self, result: Result) -> dict[str, Any]:
        if result.error is not None:
            return render_error(result.error)
        try:
            return render(result, self._top_k)
        except JpetsError as error:  # a head may not give as much as is asked for
            return render_error(error)

    def _result(self, future: Future[Result]) -> Result:
        """Waits as long as there is an engine that can answer."""
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if not self._engine.live and not future.done():
                    raise EngineFailure("the engine stopped; what was answered is kept, go on with --resume") from None


def _done(waiting: _Waiting) -> bool:
    return all(future.done() for future in waiting.futures)


def _weight(line: Asked) -> int:
    return max(1, len(line.tasks))
