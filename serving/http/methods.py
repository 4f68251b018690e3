"""HEAD, OPTIONS and the header Allow, for every route at once."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "POST", "PUT", "DELETE")


class MethodsMiddleware:
    """HEAD is answered as GET without the body, OPTIONS with the path's methods. ``routes`` are the application's."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._head(scope, receive, send)
        elif scope["method"] == "OPTIONS" and (allowed := self._allowed(scope)):
            await Response(status_code=204, headers={"Allow": allowed})(scope, receive, send)
        else:
            await self._other(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = {**scope, "method": "GET"}

        async def bare(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._other(asked, receive, bare)
        if "route" in asked:  # metrics are counted by it
            scope["route"] = asked["route"]

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def allowing(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                message = {**message, "headers": [*message["headers"]]}
                MutableHeaders(raw=message["headers"])["Allow"] = self._allowed(scope)
            await send(message)

        await self._app(scope, receive, allowing)

    def _allowed(self, scope: Scope) -> str:
        """Empty for a path that does not exist."""
        found = [method for method in METHODS if self._takes({**scope, "method": method})]
        more = ["HEAD"] if "GET" in found else []
        return ", ".join([*found, *more, "OPTIONS"]) if found else ""

    def _takes(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)
