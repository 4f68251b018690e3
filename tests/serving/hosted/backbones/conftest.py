"""One server of tiny-bert for the tests of a file; each test leaves it with only that backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import pytest
from backbone_server import (
    BUCKETS,
    FIXTURES,
    GATE,
    OTHER,
    SETTINGS,
    SHARED,
    Start,
    bitfit_task,
    state,
    validator,
    wait_for,
)
from clients import Call, client_of

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.source import load_backbone
from checkpoints.task_file import fingerprint_of, task_to_bytes
from jpets.deltas.protocol import ClassKey
from jpets.engine.engine import Engine
from jpets.engine.interface import Serves
from jpets.errors import InvalidBackbone
from serving.hosted.service import MakeEngine, Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings


@pytest.fixture(scope="module")
def other() -> Backbone:
    return load_backbone(FIXTURES / OTHER)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, other: Backbone) -> Iterator[Repository]:
    """``first`` is a task of tiny-bert, ``second`` and ``price`` are of tiny-distilbert."""
    made = Repository(tmp_path_factory.mktemp("repository"), validator=validator(backbone))
    made.put("first", task_to_bytes(bitfit_task(backbone, "first", 1)))
    made.put("second", task_to_bytes(bitfit_task(other, "second", 2)), validator=validator(other))
    price = bitfit_task(other, "price", 5)
    price = dataclasses.replace(price, head=dataclasses.replace(price.head, problem="regression"), labels=())
    made.put("price", task_to_bytes(price), validator=validator(other))
    yield made
    made.close()


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, repository: Repository, backbone: Backbone, other: Backbone
) -> Start:
    """Starts a server of tiny-bert; tiny-distilbert may be loaded."""
    cache = tmp_path_factory.mktemp("cache")

    def make(own: Backbone, engines: Callable[[], Sequence[Serves]], coming: Mapping[ClassKey, int]) -> Serves:
        assert GATE.wait(30)
        return Engine(own, (), SETTINGS, coming=coming, cache_dir=cache, buckets=BUCKETS)

    def service(own: Backbone) -> Service:
        return Service(repository, own, validator(own))

    def open_backbone(name: str, engines: Callable[[], Sequence[Serves]]) -> tuple[Service, MakeEngine]:
        assert engines()
        if name == "broken":
            raise InvalidBackbone("config.json lacks hidden_size")
        own = {
            OTHER: other,
            "copy": dataclasses.replace(backbone, name="copy"),
            "third": dataclasses.replace(other, name="third", fingerprint="sha256:3"),
        }.get(name, dataclasses.replace(other, name="misnamed"))
        return service(own), partial(make, own, engines)

    def started() -> Services:
        found = Services(
            service(backbone),
            available=lambda: [OTHER, "broken", "renamed", "copy", "first", "third"],
            open_backbone=open_backbone,
            backbone_of=fingerprint_of,
            share_memory=lambda engines: SHARED.append(len(engines)),
        )
        found.start(partial(make, backbone, tuple))
        return found

    return started


@pytest.fixture(scope="module")
def services(start: Start) -> Iterator[Services]:
    found = start()
    yield found
    found.close()


@pytest.fixture
def call(services: Services, settings: ServingSettings) -> Call:
    return client_of(services, settings)


@pytest.fixture
def loaded(call: Call) -> Iterator[None]:
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    yield
    if state(call, OTHER) == "ready":
        assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 204
