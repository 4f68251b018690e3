"""A server with keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import Call, client_to
from fastapi import FastAPI
from signed import Signed

from checkpoints.access import Access
from checkpoints.catalog import Catalog
from jpets.types import TaskName
from serving.app import create_app
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.tenants.keyring import Keyring


@pytest.fixture
def access(tmp_path: Path) -> Iterator[Access]:
    catalog = Catalog(tmp_path / "keys.sqlite")
    yield Access(catalog)
    catalog.close()


@pytest.fixture
def keyring(access: Access) -> Keyring:
    return Keyring(access)


@pytest.fixture
def app(service: Service, settings: ServingSettings, keyring: Keyring) -> FastAPI:
    return create_app(service, settings, keyring=keyring)


@pytest.fixture
def bare(app: FastAPI) -> Call:
    """Calls without a key."""
    call = client_to(app)
    call.services = app.state.context.services  # type: ignore[attr-defined]
    return call


@pytest.fixture
def signed(bare: Call, access: Access, keyring: Keyring) -> Signed:
    def make(tenant: str = "acme", *scopes: Any, **how: Any) -> Call:
        _, key = access.create(tenant, scopes or ("infer", "manage"), **how)
        keyring.refresh()

        def call(method: str, path: str, headers: Any = None, **request: Any) -> Any:
            return bare(method, path, headers={"Authorization": f"Bearer {key}", **(headers or {})}, **request)

        call.services = bare.services  # type: ignore[attr-defined]
        return call

    return make


@pytest.fixture
def theirs(service: Service, upload: Callable[..., bytes], tmp_path: Path) -> Iterator[str]:
    """The id of a task of another tenant."""
    name = TaskName("globex", "theirs")
    file = tmp_path / "theirs.safetensors"
    file.write_bytes(upload("theirs", seed=8))
    service.changes.put(name, file)
    yield name.id
    service.changes.delete(name)
