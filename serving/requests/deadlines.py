"""Deadlines of requests: counted from when the head came, so that a body's arrival and its reading take of it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from jpets.errors import DeadlineExceeded, InvalidInput
from serving.http.settings import ServingSettings
from serving.requests.context import Context

T = TypeVar("T")

TIMEOUT_HEADER = "X-Request-Timeout"
NUMBER = re.compile(r"[+-]?(?:\d{1,32}(?:\.\d{0,32})?|\.\d{1,32})(?:[eE][+-]?\d{1,3})?", re.ASCII)
LATE = "the deadline passed before the answer was computed; allow more time or send fewer inputs"
UNREAD = "the deadline passed before the body had come and was read; allow more time, or send it faster or less of it"


def seconds_of(request: Request, settings: ServingSettings, timeout: float | None = None) -> float:
    """How long after its head a request may be answered: by its header or ``timeout``, whichever is shorter, or else
    by the server's rule. Raises ``InvalidInput`` for one that is no number or too long, ``DeadlineExceeded``."""
    asked = [] if timeout is None else [timeout]
    header = request.headers.get(TIMEOUT_HEADER)
    if header is not None:
        asked.append(float(header) if NUMBER.fullmatch(header.strip()) else math.nan)
    if not all(seconds <= settings.longest_timeout for seconds in asked):  # NaN is not
        raise InvalidInput(
            f"the timeout ({TIMEOUT_HEADER} in seconds, the parameter in microseconds) must be a number of at most "
            f"{settings.longest_timeout:g} seconds"
        )
    if any(seconds <= 0 for seconds in asked):
        raise DeadlineExceeded("the deadline was already past when the request came; nothing was computed")
    return min(asked, default=settings.request_timeout)


async def in_time(here: Context, seconds: float, work: Awaitable[T], problem: str = LATE) -> T:
    """The result of ``work``, which is cancelled so many seconds after the request's head came. Raises
    ``DeadlineExceeded`` with ``problem``, and what ``work`` does."""
    limit = asyncio.timeout(here.arrived + seconds - time.monotonic())
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():  # a storage or a driver has time limits of its own
            raise
        raise DeadlineExceeded(problem) from error


async def before_deadline(request: Request, here: Context, work: Awaitable[T]) -> T:
    """``in_time`` by the request's header, or else by the server's rule."""
    return await in_time(here, seconds_of(request, here.settings), work)
