"""A gRPC server in a thread, over the tests' service."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from fastapi import FastAPI
from listening_grpc import listening
from remote import Remote

from serving.app import create_app
from serving.hosted.service import Service
from serving.http.settings import ServingSettings


@pytest.fixture(scope="session")
def app(service: Service) -> FastAPI:
    return create_app(service, ServingSettings(max_body_bytes=1 << 20))


@pytest.fixture(scope="session")
def address(app: FastAPI) -> Iterator[str]:
    with listening(app) as address:
        yield address


@pytest.fixture(scope="session")
def remote(address: str) -> Iterator[Remote]:
    with grpc.insecure_channel(address) as channel:
        yield Remote(channel)
