"""Requests with keys, and the routes that need one."""

from __future__ import annotations

from collections.abc import Callable

from clients import Call
from fastapi import FastAPI
from fastapi.routing import APIRoute

Signed = Callable[..., Call]
"""``signed(tenant, *scopes)``: calls with a new key."""


def operations(app: FastAPI) -> set[tuple[str, str]]:
    """Method and path's template of every route that an application has, but for the pages of its interface."""
    included = [getattr(route, "original_router", None) for route in app.routes]
    routes = [*app.routes, *(route for router in included if router is not None for route in router.routes)]
    known = [route for route in routes if isinstance(route, APIRoute) and not route.path.startswith("/docs")]
    return {(method, route.path) for route in known for method in route.methods or ()}
