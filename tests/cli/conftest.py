"""Task files of a tiny backbone, a repository's folder, and a real server in a thread."""

from __future__ import annotations

import http.server
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import listening
from runs import MakeTask, Run
from support import shallow
from typer.testing import CliRunner, Result

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes, write_task
from jpets.app.hosting import outlines_of
from jpets.cli import app
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Head, Task
from serving.app import create_app
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.jobs.folder import JobFolder
from serving.jobs.service import Jobs

SETTINGS = EngineSettings(
    dtype="float32", max_length=32, max_batch_tokens=64, max_batch_rows=4, slots=8, background_compile=False
)
BUCKETS = [Bucket(64, ((4, 32),))]
TRAINER = """
import json, pathlib, shutil, sys
job, made = map(pathlib.Path, sys.argv[1:])
(job / "log.txt").write_text("as if it were trained\\n")
if not (job / "data.csv").exists():
    (job / "backbone").mkdir(exist_ok=True)
    shutil.copy(made, job / "task.safetensors")
    result = {"scores": {"agreement": 1.0}}
elif "," not in (job / "data.csv").read_text():
    result = {"problem": "one column only"}
else:
    shutil.copy(made, job / "task.safetensors")
    result = {"held_out_loss": 0.5, "scores": {"accuracy": 0.75}}
(job / "progress.json").write_text(json.dumps({"step": 2, "of": 3, "loss": 0.25}))
(job / "new").write_text(json.dumps(result))
(job / "new").rename(job / "result.json")
"""
"""The process of a job that has its task already."""
VARIABLES = (
    "JPETS_REPOSITORY",
    "JPETS_SERVER",
    "JPETS_BACKBONE",
    "JPETS_DTYPE",
    "JPETS_KEY",
    "JPETS_CATALOGUE",
    "JPETS_BLOBS",
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(*arguments, input=..., env=...)``; a failure must be told in words, never by a traceback."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: object, **how: Any) -> Result:
        result = CliRunner().invoke(app, [str(each) for each in arguments], **how)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return invoke


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return shallow()


@pytest.fixture(scope="session")
def make_task(backbone: Backbone) -> MakeTask:
    def make(id: str, type: str = "sequence-classification", seed: int = 0, outputs: int = 3, **head: Any) -> Task:
        rng = np.random.default_rng(seed)
        kernel = rng.standard_normal((backbone.config.hidden_size, outputs), np.float32)
        tensors = {} if type == "embedding" else {"kernel": kernel, "bias": np.zeros(outputs, np.float32)}
        named = tensors and type != "question-answering"
        labels = tuple(f"label-{number}" for number in range(outputs)) if named else ()
        delta = METHODS["lora"].init(rng, {"rank": 4, "sites": ["query", "value"]}, backbone.config, 0.1)
        return Task(id, backbone.ref(), (delta,), Head(type, tensors, **head), labels)  # type: ignore[arg-type]

    return make


@pytest.fixture
def task_file(tmp_path: Path, make_task: MakeTask) -> Path:
    path = tmp_path / "topic.safetensors"
    write_task(make_task("topic"), path)
    return path


@pytest.fixture(scope="session")
def hosted(
    tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, make_task: MakeTask
) -> Iterator[tuple[Service, Jobs]]:
    """A service with a task of every head."""
    repository = Repository(tmp_path_factory.mktemp("served"))
    for task in (
        make_task("mood", seed=1),
        make_task("tags", seed=2, problem="multi-label"),
        make_task("price", seed=3, outputs=1, problem="regression"),
        make_task("names", "token-classification", seed=4),
        make_task("vectors", "embedding", pooling="mean"),
        make_task("questions", "question-answering", seed=5, outputs=2),
    ):
        repository.put(task.id, task_to_bytes(task))

    def validator(data: bytes | memoryview, id: str) -> Task:
        return read_task(data, id=id, config=backbone.config, backbone=backbone.fingerprint)

    service = Service(repository, backbone, validator)
    cache = tmp_path_factory.mktemp("cache")
    service.start(lambda coming: Engine(backbone, (), SETTINGS, coming=coming, cache_dir=cache, buckets=BUCKETS))
    trained = tmp_path_factory.mktemp("trained") / "trained.safetensors"
    write_task(make_task("trained", seed=6), trained)

    def command(job: JobFolder) -> list[str]:
        return [sys.executable, "-S", "-c", TRAINER, str(job.path), str(trained)]

    def keep(name: str, folder: Path) -> None:
        shutil.copytree(folder, repository.folder / "backbones" / name)

    jobs = Jobs(repository.folder / "jobs", Services(service), command, outlines_of, keep_backbone=keep)
    jobs.runner.start()
    yield service, jobs
    jobs.runner.close()
    service.close()
    repository.close()


@pytest.fixture(scope="session")
def server(hosted: tuple[Service, Jobs]) -> Iterator[str]:
    """The URL of a server without keys."""
    service, jobs = hosted
    with listening(create_app(service, training=jobs)) as url:
        yield url


@pytest.fixture
def foreign_server() -> Iterator[str]:
    """The URL of a server that knows nothing of jpets."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = (500, b"<h1>broken</h1>") if "broken" in self.path else (200, b'{"tasks": "many"}')
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def closed_port() -> int:
    """A port on which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(params=["repository", "server"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The option that names each kind of store."""
    if request.param == "repository":
        return "--repository", str(tmp_path / "repository")
    return "--server", request.getfixturevalue("server")
