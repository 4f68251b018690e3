"""The script that attacks a server's connections, in short, on a server with limits of a fraction of a second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.hostile_connections import ATTACKS, MIB, Attack, Scale, Target, Watch
from listening import listening

from serving.app import create_app
from serving.hosted.service import Service
from serving.http.connections import Connections
from serving.http.settings import ConnectionLimits, ServingSettings

LIMITS = ConnectionLimits(
    most=48, header_seconds=0.6, least_rate=10_000.0, rate_seconds=0.6, linger_seconds=0.2, look_seconds=0.02
)
SCALE = Scale(
    connections=6, crowd=100, endless=2 * MIB, body=900_000, upload=2 * MIB, uploads=2, pause=0.02, patience=20
)
NOT_HERE = ("uploads without a descriptor",)
"""It would take the descriptors of the tests, too."""


@pytest.fixture(scope="module")
def target(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    settings = ServingSettings(
        max_body_bytes=MIB, max_bodies_bytes=MIB, upload_folder=tmp_path_factory.mktemp("uploads")
    )
    app = create_app(service, settings)
    with listening(app, http=Connections(LIMITS).protocol, timeout_keep_alive=75) as url:
        host, port = url.removeprefix("http://").split(":")
        yield Target(host, int(port), os.getpid())


@pytest.fixture(scope="module")
def watch(target: Target) -> Iterator[Watch]:
    with Watch(target) as watch:
        yield watch


@pytest.mark.parametrize("attack", [each for each in ATTACKS if each.name not in NOT_HERE], ids=lambda each: each.name)
def test_attacks_get_what_they_should_and_health_goes_on(target: Target, watch: Watch, attack: Attack) -> None:
    watch.begin()
    found = attack.run(target, SCALE)
    seen = watch.end()
    assert found.keys() <= attack.expected and found[attack.needed]
    assert not seen.failed and seen.slowest > 0
    assert seen.most - seen.before < 200 * MIB


def test_nothing_of_an_upload_is_left(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = tmp_path_factory.getbasetemp().glob("uploads*")
    assert not [path for folder in folders for path in Path(folder).iterdir()]
