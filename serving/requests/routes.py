"""Routes of endpoints that take JSON: a fast path for well-formed requests, and limits on everything."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from serving.http.parameters import check_parameters
from serving.requests.bodies import read_body
from serving.requests.context import find_context
from serving.requests.deadlines import UNREAD, in_time, seconds_of

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def _nothing() -> bytes:
    return b""


BytesBehind = Annotated[bytes, Depends(_nothing)]
"""What stands behind a request's JSON, which FastAPI itself does not know of."""


class JSONRoute(APIRoute):
    """For endpoints with ``here``, ``body`` and maybe ``request``, ``behind`` and the path's parts that return a
    finished response.

    FastAPI's own handling of a request costs as much as tokenising, queueing and rendering a short text, and it builds
    a whole body before it checks any of it. The document (OpenAPI) is still FastAPI's.
    """

    says_deadline = False
    """Whether the body may say until when the request is to be answered."""

    def get_route_handler(self) -> Handler:
        endpoint = self.endpoint
        adapter: TypeAdapter[Any] = TypeAdapter(typing.get_type_hints(endpoint)["body"])
        parameters = inspect.signature(endpoint).parameters
        absent = parameters["body"].default
        default = ... if absent is inspect.Parameter.empty else absent
        takes_request, takes_bytes = "request" in parameters, "behind" in parameters

        async def handle(request: Request) -> Response:
            await check_parameters(request)
            here = await find_context(request)
            longest = here.settings.longest_timeout if self.says_deadline else None  # it is not read yet
            seconds = seconds_of(request, here.settings, longest)
            reading = read_body(request, here, adapter, default, bytes_behind=takes_bytes)
            body, behind = await in_time(here, seconds, reading, UNREAD)
            more: dict[str, Any] = {"request": request} if takes_request else {}
            if takes_bytes:
                more["behind"] = behind
            response: Response = await endpoint(here=here, body=body, **more, **request.path_params)
            return response

        return handle


class TimedRoute(JSONRoute):
    """Of a body that may allow more time than the server does by itself."""

    says_deadline = True
