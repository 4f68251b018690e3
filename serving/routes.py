"""Routes of the endpoints that are asked most: what is well-formed takes the short way."""

from __future__ import annotations

import typing
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from serving.context import find_context

JSON = "application/json"
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class InferenceRoute(APIRoute):
    """For endpoints ``(request, here, body)``, ``body`` a model, that give a finished response.

    FastAPI's own handling of a request costs as much as the whole of a short text's tokenising, queueing and rendering.
    So a JSON body is validated as it came; whatever is wrong with it is left to FastAPI, whose errors stay the same.
    """

    def get_route_handler(self) -> Handler:
        thorough: Handler = super().get_route_handler()
        endpoint = self.endpoint
        model: type[BaseModel] = typing.get_type_hints(endpoint)["body"]

        async def handle(request: Request) -> Response:
            if request.headers.get("content-type") == JSON:
                try:
                    body = model.model_validate_json(await request.body())
                except (ValidationError, ClientDisconnect):
                    return await thorough(request)
                response: Response = await endpoint(request, await find_context(request), body)
                return response
            return await thorough(request)

        return handle
