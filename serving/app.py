"""The HTTP application: every protocol on one port."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.responses import JSONResponse

from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.errors import ERROR_SCHEMAS, MANY_STATUSES, ErrorBody, documented_as, install_handlers
from serving.http.methods import MethodsMiddleware
from serving.http.parameters import check_parameters
from serving.http.settings import ServingSettings
from serving.http.uploads import Room
from serving.jobs.service import Jobs
from serving.protocols import (
    backbones,
    classify,
    domains,
    embed,
    embeddings,
    fanout,
    huggingface,
    jobs,
    keys,
    models,
    pooling,
    rerank,
    routed,
    status,
    students,
    tasks,
    tei,
)
from serving.protocols.oip import http as oip
from serving.requests.context import Context, Here, server_version
from serving.requests.metrics import CONTENT_TYPE, Metrics
from serving.requests.middleware import RequestMiddleware
from serving.tenants.gate import Gate
from serving.tenants.keyring import Keyring

DESCRIPTION = """
Thousands of fine-tuned tasks over a shared backbone, any mixture of them in one batch.

Every request may carry `X-Request-Id` (echoed, else generated) and `X-Request-Timeout` (seconds from its head).
Errors are `{"error": {"code", "message", "request_id"}}`, under `/v2` `{"error": "..."}`: 400 not parseable, 422
parseable but not acceptable, 401 no key, 403 the key does not allow it, 404 unknown or another tenant's, 405 another
method (`Allow` names those that there are), 408 sent too slowly, 409 version conflict, 413 too large, 415 another
format or encoding, 429 over quota, 431 headers too large, 503 saturated, starting or draining (429 and 503 with
`Retry-After`), 504 deadline passed, 507 disk or device full.

JSON bodies may be packed (`Content-Encoding: gzip` or `deflate`). Optional fields may be null. A query parameter that a
route does not know is refused. `HEAD` is answered as `GET`, and `OPTIONS` names a path's methods.

Where the server has keys, every request but those for health needs one: `Authorization: Bearer KEY`, or `X-API-Key`.
"""
UPLOADS, LEAST_UPLOADED = 4, 1 << 30
"""Task files of the largest size that may be on their way; bytes that may in any case."""
KEYS = "a key of the server, where it has any"
TAGS = [
    {"name": "inference", "description": "Labels, entities, answers, values and embeddings of texts"},
    {"name": "open inference protocol", "description": "A task is a model; so is the plain backbone"},
    {"name": "tasks", "description": "Which tasks there are"},
    {"name": "tenants", "description": "Who may ask for what, and how much"},
    {"name": "backbones", "description": "Which backbones there are"},
    {"name": "domains", "description": "Tables of n-gram vectors, of backbones whose lower layers they stand for"},
    {"name": "students", "description": "Groups of students, of which fewer answer while queries wait"},
    {"name": "jobs", "description": "Tasks and backbones that are being made"},
    {"name": "operation", "description": "For people and monitoring"},
]
NESTED_ERRORS = documented_as(ErrorBody, *MANY_STATUSES)
CHANGE_ERRORS = documented_as(ErrorBody, *MANY_STATUSES, 409)
"""Of what changes something."""
PAGE_ERRORS = documented_as(ErrorBody, 400, 401, 403, 408, 413, 422, 429, 431, 500, 503)


def create_app(
    service: Services | Service,
    settings: ServingSettings | None = None,
    training: Jobs | None = None,
    keyring: Keyring | None = None,
) -> FastAPI:
    """The application; it answers health and metrics at once and the rest when ``service`` has started.

    Without ``keyring`` every request is accepted, for the default tenant.
    """
    service = Services(service) if isinstance(service, Service) else service
    settings = settings or ServingSettings()
    metrics = Metrics(service, training)
    app = FastAPIOffline(  # /docs works where there is no internet
        redoc_url=None,
        title="jpets",
        version=server_version(),
        description=DESCRIPTION,
        openapi_tags=TAGS,
        redirect_slashes=False,
        dependencies=[Depends(check_parameters), Security(HTTPBearer(auto_error=False, description=KEYS))],
    )
    keyring = keyring or Keyring()
    room = Room(max(LEAST_UPLOADED, UPLOADS * settings.max_task_bytes))
    app.state.context = Context(service, settings, metrics, training, keyring=keyring, room=room)
    for module in (classify, embed, embeddings, fanout, huggingface, models, pooling, rerank, routed, tei):
        app.include_router(module.router, responses=NESTED_ERRORS)
    for module in (tasks, backbones, domains, jobs, keys, students):
        app.include_router(module.router, responses=CHANGE_ERRORS)
    app.include_router(oip.router)
    app.include_router(status.router, responses=PAGE_ERRORS)
    app.add_api_route(
        "/metrics",
        render_metrics,
        tags=["operation"],
        summary="Prometheus metrics",
        response_class=Response,
        responses=PAGE_ERRORS,
    )
    _render_document_once(app)
    install_handlers(app)
    app.add_middleware(MethodsMiddleware, routes=app.router.routes)
    app.add_middleware(
        RequestMiddleware,
        metrics=metrics,
        gate=Gate(keyring, local=settings.local),
        max_body_bytes=settings.max_body_bytes,
        max_bodies_bytes=settings.max_bodies_bytes,
    )
    return app


def _render_document_once(app: FastAPI) -> None:
    """Renders the OpenAPI document, with the errors that it refers to, once: rendering takes a millisecond, and a
    client that asks for it again and again must not block the event loop for others."""

    def described() -> dict[str, Any]:
        found = FastAPI.openapi(app)
        found["components"]["schemas"].update(ERROR_SCHEMAS)
        return found

    app.openapi = described  # type: ignore[method-assign]

    @functools.cache
    def document() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    async def answer(request: Request) -> Response:
        del request
        return Response(document(), media_type=JSONResponse.media_type)

    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) != app.openapi_url]
    app.add_route(str(app.openapi_url), answer, include_in_schema=False)


async def render_metrics(here: Here) -> Response:
    return Response(here.metrics.render(), media_type=CONTENT_TYPE)
