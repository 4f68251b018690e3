"""Errors as JSON. Nothing of a query, a key or a path of the machine gets into an answer or a log."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from jpets.errors import EngineFailure, InvalidInput, JpetsError, Unparseable
from serving.http.logs import places

log = logging.getLogger(__name__)

INFERENCE_PROTOCOL = "/v2"
CLIENT_GONE = 499
"""Status in metrics of a request with a client that left; it is not sent."""
SHOWN_ERRORS = 4
MANY_STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429, 431, 500, 503, 504, 507)
"""Of errors that any request for answers or for a change may end in."""
HTTP_CODES = {
    400: "unparseable",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
    503: "saturated",
}
UNROUTED = {
    "Not Found": "there is nothing at this path; GET /docs lists what there is",
    "Method Not Allowed": "this path does not take that method; the header Allow names those that it takes",
}
"""Our own messages for the router's errors."""
KIND = re.compile(r"str|int|constrained-.*|.*[\[(].*")


class ClientGone(Exception):
    """The client closed its connection; no answer can be sent."""


class ErrorDetail(BaseModel):
    code: str
    message: str
    request_id: str


class ErrorBody(BaseModel):
    """The shape of every error outside ``/v2``."""

    error: ErrorDetail


class InferenceErrorBody(BaseModel):
    """The shape of every error under ``/v2``."""

    error: str


REFERENCE = "#/components/schemas/{model}"
ERROR_SCHEMAS: dict[str, Any] = models_json_schema(
    [(ErrorBody, "serialization"), (InferenceErrorBody, "serialization")], ref_template=REFERENCE
)[1]["$defs"]


def documented_as(body: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of routes in the OpenAPI document, by reference to ``ERROR_SCHEMAS``: of a model FastAPI would make a
    validator for each status of each route, when the route is first asked."""
    schema = {"$ref": REFERENCE.format(model=body.__name__)}
    return {status: {"content": {"application/json": {"schema": schema}}} for status in statuses}


INFERENCE_ERRORS = documented_as(InferenceErrorBody, *MANY_STATUSES)


def error_response(
    scope: Mapping[str, object], status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error in the shape of the protocol that ``scope``'s path belongs to."""
    path = str(scope["path"])
    if path == INFERENCE_PROTOCOL or path.startswith(INFERENCE_PROTOCOL + "/"):
        return JSONResponse({"error": message}, status, headers)
    told = {"code": code, "message": message, "request_id": request_id_of(scope)}
    return JSONResponse({"error": told}, status, headers)


def request_id_of(scope: Mapping[str, object]) -> str:
    state = scope.get("state")
    return str(state.get("request_id", "")) if isinstance(state, dict) else ""


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(JpetsError, _jpets_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)


def retry_headers(error: JpetsError | type[JpetsError]) -> dict[str, str]:
    return {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}


def log_unexpected(error: BaseException, request_id: str) -> None:
    """Type and places only: the text of an unforeseen exception may quote a query."""
    kind = type(error).__name__
    log.error("unexpected error: %s", kind, extra={"type": kind, "at": places(error), "request_id": request_id})


def is_failure(error: JpetsError) -> bool:
    """Whether it is this server's, and no client's."""
    return error.status == EngineFailure.status


def numbered(error: JpetsError, request_id: str) -> str:
    """What a client is told of a failure where no header names the request."""
    return f"{error.message} (request {request_id})"


def log_failure(error: JpetsError, request_id: str) -> None:
    """A failure of this server: its operator looks for the number that a client names."""
    log.warning("failed", extra={"code": error.code, "request_id": request_id})


async def _jpets_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JpetsError)
    if is_failure(error):
        log_failure(error, request_id_of(request.scope))
    return error_response(request.scope, error.status, error.code, error.message, retry_headers(error))


async def _invalid_request(request: Request, error: Exception) -> Response:
    """Answers FastAPI's validation errors, without the values that it found."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return error_response(request.scope, Unparseable.status, Unparseable.code, "the body is not valid JSON")
    return error_response(request.scope, InvalidInput.status, InvalidInput.code, worded(found))


def worded(found: Sequence[Any]) -> str:
    """The first of pydantic's problems, one sentence each: where, and what was expected."""
    lines = [f"{_place(each['loc'])}: {each['msg'].removeprefix('Value error, ')}" for each in found[:SHOWN_ERRORS]]
    more = [f"and {len(found) - SHOWN_ERRORS} more"] if len(found) > SHOWN_ERRORS else []
    return "; ".join([*dict.fromkeys(lines), *more])


def _place(parts: Sequence[str | int]) -> str:
    """A field's path without pydantic's names for the alternatives of its type."""
    path = [str(part)[:40] for part in parts if part != "body"]
    names = [part for at, part in enumerate(path) if not at or not KIND.fullmatch(part)]
    return ".".join(names).encode(errors="replace").decode() or "body"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTP_CODES.get(error.status_code, "invalid_request")
    message = UNROUTED.get(str(error.detail), str(error.detail))
    return error_response(request.scope, error.status_code, code, message, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=CLIENT_GONE)
