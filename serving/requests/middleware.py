"""What happens around every request: its id, the limit on its body, its metrics, the last handler of errors."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpets.errors import TooLarge, Unauthorized
from serving.http.body_budget import BODY, BodyBudget
from serving.http.descriptors import shortage
from serving.http.errors import error_response, log_unexpected, retry_headers
from serving.http.fields import declared_length
from serving.requests.metrics import Metrics
from serving.tenants.gate import Gate
from serving.tenants.keyring import REFUSAL

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
UPLOADS = re.compile(r"PUT /v1/tasks/[^/]*|POST /v1/(jobs|students|domains).*", re.DOTALL)
"""Bodies of these methods and paths are files, which are limited where they are written."""


class BodyTooLarge(HTTPException):
    """FastAPI lets only its own exceptions through while it reads a body."""

    def __init__(self, limit: int) -> None:
        super().__init__(TooLarge.status, f"the body has more than {limit} bytes; send fewer inputs in one request")


class KeyEnded(HTTPException):
    """As ``BodyTooLarge``, for a key that was accepted when the head came."""

    def __init__(self) -> None:
        super().__init__(Unauthorized.status, REFUSAL, {"WWW-Authenticate": "Bearer"})


class AnswerEnded(Exception):
    """An answer that is sent in pieces ends with its key."""


class RequestMiddleware:
    """Wraps the application. ``gate`` lets a request in before anything of its body is read, and is asked again at each
    part of a body and each piece of a long answer. A body that is too large is refused by its declared length, or once
    that many bytes have come; ``max_bodies_bytes`` is the limit of all bodies in memory."""

    def __init__(self, app: ASGIApp, metrics: Metrics, gate: Gate, max_body_bytes: int, max_bodies_bytes: int) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._limit = max_body_bytes
        self._budget = BodyBudget(max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        state, started = scope.setdefault("state", {}), time.monotonic()
        state["request_id"] = request_id.decode()
        state.setdefault("arrived", started)  # where the connection did not say so
        status, waits_to_send = 0, b"expect" in headers

        async def noted() -> Message:
            nonlocal waits_to_send
            waits_to_send = False
            message = await receive()
            if message["type"] == "http.request" and not status and not self._gate.accepts(scope):
                raise KeyEnded
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if waits_to_send:  # the next bytes may be that body or another request
                    message["headers"].append((b"connection", b"close"))
            elif message.get("more_body", False) and not self._gate.accepts(scope):
                raise AnswerEnded
            await send(message)

        try:
            if (refusal := self._gate.admit(scope, headers)) is not None:
                await refusal(scope, noted, answer)
            else:
                await self._bounded(scope, headers, noted, answer)
        except AnswerEnded:  # the connection closes, as the answer is not whole
            log.warning("a key ended while its answer was sent", extra={"request_id": request_id.decode()})
        except Exception as error:  # noqa: BLE001 (the last handler: the client gets an answer, the log the place)
            lack = shortage(error)
            if lack is None:
                log_unexpected(error, request_id.decode())
                response = error_response(scope, 500, "internal", "the server failed; the log has the details")
            else:
                log.warning("shortage", extra={"why": lack.message, "request_id": request_id.decode()})
                response = error_response(scope, lack.status, lack.code, lack.message, retry_headers(lack))
            if not status:
                await response(scope, receive, answer)
        finally:
            seconds = time.monotonic() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.request(route, status, seconds)
            fields = {"route": route, "status": status, "seconds": round(seconds, 4), "request_id": request_id.decode()}
            log.debug("request", extra=fields)

    async def _bounded(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if UPLOADS.fullmatch(f"{scope['method']} {scope['path']}"):
            await self._app(scope, receive, send)
            return
        if declared_length(headers.get(b"content-length", b"0").decode("latin-1")) > self._limit:
            error = BodyTooLarge(self._limit)
            await error_response(scope, error.status_code, TooLarge.code, error.detail)(scope, receive, send)
            return
        with self._budget.body(receive) as body:
            got = 0
            scope[BODY] = body

            async def counted() -> Message:
                nonlocal got
                message = await body.receive()
                got += len(message.get("body", b""))
                if got > self._limit:
                    raise BodyTooLarge(self._limit)
                return message

            await self._app(scope, counted, send)
