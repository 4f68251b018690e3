"""A server in this process, for two on one repository."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clients import Call, client_of, samples

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from jpets.config import EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import TaskName
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings

SETTINGS = EngineSettings(
    dtype="float32", max_length=16, max_batch_tokens=128, max_batch_rows=8, slots=7, background_compile=False
)
BUCKETS = [Bucket(128, ((8, 16),))]
Upload = Callable[..., bytes]


@dataclasses.dataclass
class Server:
    repository: Repository
    services: Services
    settings: ServingSettings
    call: Call

    @property
    def service(self) -> Service:
        return self.services.first

    @property
    def engine(self) -> Engine:
        found = self.service.engine
        assert isinstance(found, Engine)
        return found

    def put(self, id: str, data: bytes) -> int:
        answer = self.call("PUT", f"/v1/tasks/{id}", content=data)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["version"])

    def ask(self, id: str) -> Any:
        answer = self.call("POST", "/v1/classify", json={"model": id, "input": "hello world"})
        return answer.json()["data"] if answer.is_success else answer.status_code

    def tells(self, ids: Sequence[str]) -> dict[str, Any]:
        """All answers by which a client could tell two servers apart."""
        gauges = samples(self.call)
        return {
            "list": self.call("GET", "/v1/tasks").json(),
            "answers": {id: self.ask(id) for id in ids},
            "versions": {id: self.service.tasks.version(TaskName.of(id)) for id in ids},
            "ready": {id: self.call("GET", f"/v2/models/{id}/ready").status_code for id in ids},
            "known": gauges["jpets_tasks", (("tier", "repository"),)],
        }


def make_server(
    folder: Path,
    backbone: Backbone,
    validator: Any,
    cache: Path,
    settings: ServingSettings,
    catalogue: str | None = None,
) -> Server:
    """One with a catalogue of its own follows by itself; in a folder the tests say when."""
    repository = Repository.open(folder, catalogue=catalogue, validator=validator)
    services = Services(Service(repository, backbone, validator))

    def make(coming: Mapping[ClassKey, int]) -> Engine:
        return Engine(backbone, (), SETTINGS, coming=coming, cache_dir=cache, buckets=BUCKETS)

    (services.first if catalogue is None else services).start(make)
    return Server(repository, services, settings, client_of(services, settings))
