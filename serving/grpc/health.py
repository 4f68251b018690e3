"""``grpc.health.v1``: whether the server takes queries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from serving.grpc.messages import HEALTH, SERVICE
from serving.requests.context import Context

SERVICES = ("", SERVICE, HEALTH)
LOOK = 0.5
"""Seconds between looks for those that watch."""
Status = health_pb2.HealthCheckResponse


class Health:
    """Serving until the server drains, once its programs and most used tasks are there. At most so many ``watchers``
    are told of changes: the other places are for calls that end."""

    def __init__(self, here: Context, watchers: int) -> None:
        self._here = here
        self._watching, self._most = 0, watchers

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"expected one of the services {list(SERVICES)}")
        return Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self._watching >= self._most:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most} watch already; ask Check")
        self._watching += 1
        try:
            told = None
            while told is None or not self._here.services.first.tasks.closing or told == Status.SERVING:
                if (now := self._status(request.service)) != told:
                    yield Status(status=now)
                    told = now
                else:
                    await asyncio.sleep(LOOK)
        finally:
            self._watching -= 1

    def _status(self, service: str) -> Any:
        if service not in SERVICES:
            return Status.SERVICE_UNKNOWN
        return Status.SERVING if self._here.services.first.ready else Status.NOT_SERVING
