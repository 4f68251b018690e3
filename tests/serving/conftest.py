"""One tiny engine for all front-end tests, with tasks of every head, behind an in-process client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import Call, client_of

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, task_to_bytes
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Delta, Head, Preprocessing, Task
from serving.hosted.repository import Validator
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

FIXTURES = Path(__file__).parents[1] / "fixtures"
LORA = {"rank": 4, "sites": ["query", "value"]}
SETTINGS = EngineSettings(
    dtype="float32", max_length=64, max_batch_tokens=128, max_batch_rows=8, slots=12, background_compile=False
)
BUCKETS = [Bucket(128, ((8, 16), (2, 64)))]


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone(FIXTURES / "tiny-bert")


@pytest.fixture(scope="session")
def make_task(backbone: Backbone) -> Callable[..., Task]:
    def make(
        id: str, outputs: int = 3, type: str = "sequence-classification", seed: int = 0, rank: int = 4, **head: Any
    ) -> Task:
        rng = np.random.default_rng(seed)
        size = backbone.config.hidden_size
        tensors = {}
        if type != "embedding":
            kernel = rng.standard_normal((size, outputs)).astype(np.float32)
            tensors = {"kernel": kernel, "bias": np.zeros(outputs, np.float32)}
        delta = METHODS["lora"].init(rng, {**LORA, "rank": rank}, backbone.config, 0.1)
        named = tensors and type != "question-answering"
        labels = tuple(f"label-{number}" for number in range(outputs)) if named else ()
        if type == "token-classification":
            labels = ("O", *(f"B-{number}" for number in range(outputs - 1)))
        rule = Preprocessing(thresholds=(0.5,) * outputs if head.get("problem") == "multi-label" else None)
        return Task(id, backbone.ref(), (delta,), Head(type, tensors, **head), labels, rule)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def tasks(make_task: Callable[..., Task]) -> list[Task]:
    return [
        make_task("topic", seed=1),
        make_task("tags", seed=2, problem="multi-label"),
        make_task("price", outputs=1, seed=3, problem="regression"),
        make_task("names", type="token-classification", seed=4),
        make_task("vectors", type="embedding", seed=5, pooling="mean", normalize=True),
        make_task("questions", outputs=2, type="question-answering", seed=6),
    ]


@pytest.fixture(scope="session")
def validator(backbone: Backbone) -> Validator:
    return lambda data, id: read_task(data, id=id, config=backbone.config, backbone=backbone.fingerprint)


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    backbone: Backbone,
    tasks: list[Task],
    validator: Validator,
) -> Iterator[Service]:
    """Started on a repository that holds ``tasks``; the engine also has a task of NaN, which no repository accepts."""
    repository = Repository(tmp_path_factory.mktemp("repository"), validator=validator)
    for task in tasks:
        repository.put(task.id, task_to_bytes(task))
    service = Service(repository, backbone, validator, growing=False)
    cache = tmp_path_factory.mktemp("cache")
    service.start(lambda coming: Engine(backbone, (), SETTINGS, coming=coming, cache_dir=cache, buckets=BUCKETS))
    service.engine.add_task(broken(tasks[0]))
    yield service
    service.close()
    repository.close()


def broken(task: Task) -> Task:
    (delta,) = task.deltas
    tensors = {name: np.full_like(array, np.nan) for name, array in delta.tensors.items()}
    return Task("broken", task.backbone, (Delta(delta.method, delta.settings, tensors),), task.head, task.labels)


@pytest.fixture(scope="session")
def engine(service: Service) -> Engine:
    own = service.engine
    assert isinstance(own, Engine)
    return own


@pytest.fixture
def settings(tmp_path: Path) -> ServingSettings:
    return ServingSettings(max_body_bytes=1 << 20, max_task_bytes=1 << 20, upload_folder=tmp_path)


@pytest.fixture
def call(service: Service, settings: ServingSettings) -> Call:
    """``call(method, path, **httpx)`` against the application, in process."""
    return client_of(service, settings)


@pytest.fixture
def upload(make_task: Callable[..., Task]) -> Callable[..., bytes]:
    """The bytes of a task file."""
    return lambda id, **how: task_to_bytes(make_task(id, **how))
