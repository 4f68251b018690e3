"""An HTTP client that talks to the application in process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from support import wait_until

from serving.app import create_app
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs.service import Jobs
from serving.tenants.keyring import Keyring

Call = Callable[..., httpx.Response]
"""(method, path, **httpx's arguments) -> the response"""


def client_of(
    service: Service | Services,
    settings: ServingSettings,
    training: Jobs | None = None,
    keyring: Keyring | None = None,
) -> Call:
    """Calls a fresh application around ``service``."""
    return client_to(create_app(service, settings, training, keyring))


def client_to(app: FastAPI) -> Call:

    async def send(method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            response = await client.request(method, path, **request)
        check_documented(app, method, response)
        return response

    return lambda method, path, **request: asyncio.run(send(method, path, request))


def check_documented(app: FastAPI, method: str, response: httpx.Response) -> None:
    """Asserts that the OpenAPI document, if it has the operation, knows the status."""
    if not DOCUMENTED:
        DOCUMENTED.extend(_operations(app.openapi()))
    method = "get" if method == "HEAD" else method.lower()
    for pattern, operations in DOCUMENTED:
        if method in operations and pattern.fullmatch(response.url.path):
            known = operations[method]["responses"]
            assert str(response.status_code) in known, f"{method} {response.url.path}: {response.status_code}, {known}"
            return


DOCUMENTED: list[tuple[re.Pattern[str], dict[str, Any]]] = []
"""Paths and their operations, the same for all applications."""


def _operations(document: dict[str, Any]) -> Iterator[tuple[re.Pattern[str], dict[str, Any]]]:
    for path, operations in sorted(document["paths"].items(), key=lambda item: item[0].count("{")):
        yield re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), operations


def samples(call: Call) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of every sample of ``/metrics``."""
    text = call("GET", "/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def finished(call: Call, id: str) -> Any:
    """A job, once it has ended."""

    def look() -> Any:
        item = call("GET", f"/v1/jobs/{id}").json()
        return None if item["state"] in ("queued", "running") else item

    return wait_until(look, 600)


def wait_for_preparations(service: Service) -> None:
    """Waits until the versions have been looked at whose classes have come, or could not."""
    service.preparations._finishing.submit(lambda: None).result(60)
