"""From a request's queries to the response: one submission, a deadline, and a watch for the client's leaving."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response

from jpets.errors import DeadlineExceeded, InvalidInput, TooLarge
from jpets.results import CombinedFuture
from jpets.types import Classification, Embedding, Failure, Fills, Query, Regression, Result, Span, Tokens
from serving.http.aside import SHORT
from serving.http.errors import ClientGone
from serving.http.responses import FastJSONResponse
from serving.requests.context import Context
from serving.requests.deadlines import LATE, in_time, seconds_of
from serving.tenants.allowance import computed_tokens

STUDENTS_HEADER = "X-Students"
Answer = TypeVar("Answer")
Respond = Callable[[Sequence[Result]], Any]
"""Makes the response's content from results, or the response itself."""
RENDERED = 16
"""The results of this many characters are written in the time that tokenising one takes."""
WRITTEN = 4
"""Effort of one of an answer's numbers, in characters."""
FILLED = SHORT + 1
"""Effort of a mask, in characters: it is compared with all tokens."""
MOST_MASKS = 256
"""Of a request."""
AT_ONCE, LEAST_BOUND = 8, 1 << 20
"""Most characters of a request's queries together: so many times the largest body, since one text may be asked of many
tasks, or beside many others; and never fewer than the second number."""
EACH = 100
"""Effort of a query apart from its text, in characters."""


async def ask(
    request: Request, here: Context, queries: Sequence[Query], respond: Respond, seconds: float | None = None
) -> Response:
    """``answer``, with ``respond``'s content as JSON, or its response as it is.

    ``seconds`` since the request's head came bound the wait, by default those of ``seconds_of``. When the client
    leaves, its queries are cancelled. Also raises ``ClientGone``.
    """
    if seconds is None:
        seconds = seconds_of(request, here.settings)
    return await answer(here, queries, partial(_written, respond), seconds, gone=partial(_client_leaves, request))


async def answer(
    here: Context,
    queries: Sequence[Query],
    respond: Callable[[int, Sequence[Result]], Answer],
    seconds: float,
    gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Answer:
    """``respond`` of the effort of ``queries`` (characters) and their results, in order; a single query's error is in
    its ``error``.

    The queries reach the engine as one submission, so they can share a batch. They are cancelled ``seconds`` after the
    request came, when ``gone`` ends, or when this is cancelled.
    Raises ``TooLarge``, ``OverQuota``, ``Saturated``, ``DeadlineExceeded``, ``InvalidInput``, ``ClientGone``, and what
    ``respond`` does.
    """
    check_count(len(queries), here)
    allowance = here.asker.allowance
    until = here.arrived + seconds
    effort = sum(map(_effort, queries))
    if effort > (most := max(LEAST_BOUND, AT_ONCE * here.settings.max_body_bytes)):
        raise TooLarge(
            f"the texts have {effort} characters, each counted as often as it is asked, the limit is {most}; split the "
            "request into several"
        )

    def submit() -> list[Future[Result]]:
        if (left := until - time.monotonic()) <= 0:
            raise DeadlineExceeded(LATE)
        return here.services.submit(queries, deadline=left, priority=here.asker.priority, tenant=here.asker.tenant)

    counted = allowance.queries(queries, here.services.longest)
    loop = asyncio.get_running_loop()
    try:
        if effort <= SHORT:  # nothing is awaited
            futures = submit()
        else:
            futures = await in_time(here, seconds, _submitted(here, effort, submit))
    except BaseException:  # a key that ends cancels its requests
        allowance.give_back(counted)
        raise
    end: asyncio.Future[None] = loop.create_future()
    _when_all_done(futures, partial(_finish, end), loop)
    late = loop.call_later(until - time.monotonic(), _finish, end, DeadlineExceeded(LATE))
    watch = None if gone is None else loop.create_task(gone())
    if watch is not None:
        watch.add_done_callback(lambda _: _finish(end, ClientGone()))
    try:
        await end
        results = [future.result() for future in futures]
    finally:
        late.cancel()
        if watch is not None:
            watch.cancel()
        for future in futures:
            future.cancel()
        if counted:
            allowance.settle(counted, tokens_of(futures))
    results = _few_masks(results, several=len({query.task for query in queries}) > 1)
    effort += FILLED * RENDERED * sum(map(_masks, results))
    effort += WRITTEN * sum(map(_numbers, results))
    return await here.aside.do(effort // RENDERED, partial(respond, effort, results))


def tokens_of(futures: Sequence[Future[Result]]) -> list[int | None]:
    """How many tokens each has computed; None where a cancelled one is being computed still: others have left the
    queue."""
    each = [own.parts if isinstance(own, CombinedFuture) and own.cancelled() else [own] for own in futures]
    ended = concurrent.futures.wait([part for parts in each for part in parts], timeout=0).done

    def computed(part: Future[Result]) -> int:
        return 0 if part.cancelled() or part.exception() else computed_tokens(part.result())

    return [sum(map(computed, parts)) if ended.issuperset(parts) else None for parts in each]


def _few_masks(results: list[Result], *, several: bool) -> list[Result]:
    """Raises ``TooLarge`` for more masks than a request may have; of ``several`` tasks those beyond it get the error,
    as one task's errors are not the others'."""
    masks = list(itertools.accumulate(map(_masks, results)))
    if not masks or masks[-1] <= MOST_MASKS:
        return results
    error = TooLarge(f"the texts have {masks[-1]} masks, at most {MOST_MASKS} are filled at once; send fewer")
    if not several:
        raise error
    return [
        Failure(task=each.task, tokens=each.tokens, error=error) if _masks(each) and so_far > MOST_MASKS else each
        for each, so_far in zip(results, masks, strict=True)
    ]


def _masks(result: Result) -> int:
    return len(result.outputs) if isinstance(result, Fills) else 0


async def _submitted(here: Context, effort: int, submit: Callable[[], list[Future[Result]]]) -> list[Future[Result]]:
    """``submit()`` in another thread; where this is cancelled meanwhile, so is what it submits."""
    submission = asyncio.ensure_future(here.aside.do(effort, submit))
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        submission.add_done_callback(_cancel_submitted)
        raise


def _cancel_submitted(submission: asyncio.Future[list[Future[Result]]]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        for future in submission.result():
            future.cancel()


def _written(respond: Respond, effort: int, results: Sequence[Result]) -> Response:
    """In pieces where it is long: writing a piece holds the interpreter's lock to its end. A header says how many
    students of groups made the answers, at least: not every protocol has a place for it."""
    content = respond(results)
    if isinstance(content, Response):
        response = content
    elif effort <= SHORT * RENDERED:
        response = FastJSONResponse(content)
    else:
        response = FastJSONResponse.in_pieces(content)
    if made := [result.students for result in results if result.students is not None]:
        response.headers[STUDENTS_HEADER] = str(min(made))
    return response


def _finish(end: asyncio.Future[None], error: Exception | None = None) -> None:
    if end.done():
        return
    if error is None:
        end.set_result(None)
    else:
        end.set_exception(error)


def _when_all_done(
    futures: Sequence[Future[Result]], then: Callable[[], None], loop: asyncio.AbstractEventLoop
) -> None:
    """Calls ``then`` on the event loop after the last of ``futures``: one wake-up, however many there are."""
    left = itertools.count(len(futures) - 1, -1)

    def one(future: Future[Result]) -> None:
        del future
        if next(left) == 0:
            with contextlib.suppress(RuntimeError):  # the loop has ended: no request waits
                loop.call_soon_threadsafe(then)

    for future in futures:
        future.add_done_callback(one)


def check_count(found: int, here: Context) -> None:
    """Raises ``TooLarge``, ``InvalidInput``."""
    if found == 0:
        raise InvalidInput("the request has no inputs; send at least one")
    if found > here.settings.max_inputs:
        raise TooLarge(
            f"the request has {found} inputs, the limit is {here.settings.max_inputs}; split it into several requests"
        )


def raise_first_error(results: Sequence[Result]) -> None:
    """For protocols that answer a request as a whole: raises the first row's error, with the row's number in it."""
    for index, result in enumerate(results):
        if result.error is not None:
            where = f"input {index}: " if len(results) > 1 else ""
            raise type(result.error)(where + result.error.message)


def _effort(query: Query) -> int:
    return EACH + sum(len(part) for part in (query.text, query.text_pair, query.input_ids) if part is not None)


def _numbers(result: Result) -> int:
    """How many numbers an answer is made of."""
    if isinstance(result, Embedding):
        return result.embedding.size
    return result.logits.size if isinstance(result, Classification | Regression | Tokens | Span) else 0


async def _client_leaves(request: Request) -> None:
    """Ends when the client closes its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
