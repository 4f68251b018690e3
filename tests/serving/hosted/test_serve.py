"""The process: ``python -m jpets.serve`` over loopback, its start, its end, and errors that prevent its start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from remote import Remote
from server_process import ROOT, SMALL, start, url_of

from checkpoints.repository import Repository
from jpets.app.hosting import add_demo_tasks, make_engine, validator_of
from jpets.app.standard import standard_methods, standard_tasks
from jpets.config import NAMED_BACKBONES, SizingRule
from jpets.deltas import METHODS
from jpets.deltas.bank import lower_task, tightest
from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.students.serving import StudentServing
from jpets.errors import InvalidInput, InvalidTask
from jpets.scheduling.balancing.rounds import AdaptiveInterval
from jpets.training.methods import checked_settings
from jpets.types import Head, Task
from serving.app import create_app
from serving.hosted.service import Service
from serving.http.settings import MIB, ServingSettings
from serving.options.options import read_options

TINY = ROOT / "tests" / "fixtures" / "tiny-bert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its URL."""
    process = start(
        "--repository", folder / "repository", "--cache-dir", folder / "cache", *SMALL, JPETS_BACKBONE=str(TINY)
    )
    with process:
        yield process, url_of(process)
        process.kill()


def test_speaks_grpc_on_a_port_of_its_own(server: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = server
    assert process.stdout is not None
    found = re.fullmatch(r"  gRPC .* at (127.0.0.1:\d+)\n", process.stdout.readline())
    assert found
    with grpc.insecure_channel(found[1]) as channel:
        remote = Remote(channel)
        text = {"name": "text", "shape": [1], "datatype": "BYTES", "contents": {"bytes_contents": [b"some text"]}}
        answer = remote("ModelInfer", model_name="tiny-bert", inputs=[text])
        assert [each.name for each in answer.outputs] == ["embedding"]
        health = health_pb2_grpc.HealthStub(channel)
        assert (
            health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING
        )


def test_serves_and_drains_on_sigterm(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    assert httpx.get(f"{url}/v2/health/ready").json() == {"ready": True}
    body = {"model": "tiny-bert", "input": ["some text of several words"] * 1000, "encoding_format": "base64"}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(httpx.post, f"{url}/v1/embeddings", json=body, timeout=30)
        while not re.search(r"^jpets_queue_depth [1-9]", httpx.get(f"{url}/metrics").text, re.MULTILINE):
            assert not running.done()
        process.send_signal(signal.SIGTERM)
        answer = running.result()
    assert process.wait(timeout=20) == 0
    assert (answer.status_code, len(answer.json()["data"])) == (200, 1000)
    assert process.stderr is not None
    errors = process.stderr.read()
    assert "Traceback" not in errors and " error " not in errors


def test_port_is_open_and_stops_while_it_starts(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = SMALL[:-2]
    process = start("--backbone", TINY, "--cache-dir", tmp_path, "--port", str(port), *options, "--grace", "5")
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            live = httpx.get(f"{url}/v2/health/live")
            break
        except httpx.ConnectError:
            assert process.poll() is None
            time.sleep(0.05)
    assert live.json() == {"live": True}
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "tiny-bert", "input": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "ready" not in output and "Traceback" not in errors


PROBLEMS = ("backbone", "folder", "repository", "catalogue", "port", "grpc port", "option", "nothing")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_cannot_start_says_so_in_one_line(tmp_path: Path, problem: str) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "catalog.sqlite").write_bytes(b"not a database" * 100)
    backbone, repository, port, more = TINY, tmp_path / "new", "0", []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if problem == "backbone":
            backbone = tmp_path / "no-such-model"
        elif problem == "folder":
            backbone = tmp_path
        elif problem == "repository":
            repository = tmp_path / "file"
        elif problem == "catalogue":
            repository = tmp_path / "bad"
        elif problem == "port":
            port = str(taken.getsockname()[1])
        elif problem == "grpc port":
            more = ["--grpc-port", str(taken.getsockname()[1])]
        elif problem == "option":
            more = ["--dtype", "int8"]
        options: Sequence[str | Path] = ["--backbone", backbone, "--repository", repository, "--port", port, *more]
        process = start(*([] if problem == "nothing" else options), HF_HUB_OFFLINE="1")
        output, errors = process.communicate(timeout=60)
    lines = errors.strip().splitlines()
    assert process.returncode != 0
    assert output == ""
    assert len(lines) == 1 and lines[0].startswith("jpets: "), errors


def test_client_that_leaves_over_a_socket(service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    futures: list[Future[Any]] = []
    asked = threading.Event()

    def never(queries: Sequence[Any], **_: object) -> list[Future[Any]]:
        futures.extend(Future() for _ in queries)
        asked.set()
        return futures

    monkeypatch.setattr(engine, "submit", never)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        front = uvicorn.Server(uvicorn.Config(create_app(service), log_config=None, lifespan="off"))
        thread = threading.Thread(target=front.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            body = b'{"model": "topic", "input": ["a", "b"]}'
            head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            while not front.started:
                time.sleep(0.01)
            with socket.create_connection(listener.getsockname()) as client:
                client.sendall(head + body)
                assert asked.wait(5)
            until = time.monotonic() + 5
            while not all(future.cancelled() for future in futures) and time.monotonic() < until:
                time.sleep(0.01)
            assert len(futures) == 2 and all(future.cancelled() for future in futures)
        finally:
            front.should_exit = True
            thread.join(10)


def test_options_come_from_line_then_environment_then_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "jpets.toml"
    file.write_text('backbone = "from-file"\nslots = 3\nmax_queue = 5\nport = 1\nresponse_cache_mb = 7\n')
    monkeypatch.setenv("JPETS_SLOTS", "4")
    monkeypatch.setenv("JPETS_PORT", "2")
    options = read_options({"port": 3, "host": None}, file)
    assert (options.backbone, options.max_queue, options.slots, options.port) == ("from-file", 5, 4, 3)
    assert (options.host, options.engine_settings().slots) == ("127.0.0.1", 4)
    assert options.engine_settings().response_cache_mb == 7
    assert options.serving_settings() == ServingSettings(max_inputs=5)


def test_every_option_reaches_the_front(tmp_path: Path) -> None:
    given = {
        "request_timeout": 7.5, "max_inputs": 11, "default_task": "topic", "max_body_mb": 3, "max_task_mb": 600,
        "max_data_mb": 5, "max_bodies_mb": 6, "max_connections": 12, "keep_alive": 8, "students_groups": 3,
        "students_together": 9, "students_window": 4.0,
    }  # fmt: skip
    options = read_options({"demo": True} | given)
    found = options.serving_settings()
    assert found == ServingSettings(
        request_timeout=7.5, max_inputs=11, default_task="topic", max_body_bytes=3 * MIB, max_task_bytes=512 * MIB,
        max_data_bytes=5 * MIB, max_bodies_bytes=6 * MIB,
    )  # fmt: skip
    assert read_options({"demo": True} | {"max_task_mb": 4}).serving_settings().max_task_bytes == 4 * MIB
    limits = options.connection_limits()
    assert (limits.most, limits.keep_alive) == (12, 8)
    assert options.sizing_rule("auto") == SizingRule(3, 9, 4.0, fixed=False)
    assert options.sizing_rule("steady").fixed and read_options({"demo": True}).sizing_rule("auto") == SizingRule()
    assert read_options({"demo": True} | {"students": "all"}).sizing_rule("auto").fixed


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_queue": 512, "max_inputs": 600}, "--max-inputs: expected at most 512, which may wait"),
        ({"max_body_mb": 2048}, "--max-body-mb: .*2047"),
        ({"keep_alive": 86401}, "--keep-alive: .*86400"),
        ({"repository": ""}, "--repository: expected a path"),
        ({"backbones": ""}, "--backbones: expected a path"),
    ],
)
def test_options_that_would_do_harm_are_refused(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=told):
        read_options({"demo": True} | given)
    file = tmp_path / "jpets.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    with pytest.raises(InvalidInput, match=told.partition(":")[0][2:].replace("-", "_")):
        read_options({"demo": True}, file)


def test_few_may_wait_without_more_being_said() -> None:
    options = read_options({"demo": True} | {"max_queue": 8})
    assert options.max_inputs == 1024 and options.serving_settings().max_inputs == 8, "more would never be taken"


def test_the_demo_on_another_backbone_is_refused(backbone: Any, tmp_path: Path) -> None:
    with (
        contextlib.closing(Repository.open(tmp_path, validator=validator_of(backbone))) as repository,
        pytest.raises(InvalidInput, match=r"--demo: its tasks are of .*JPETS_BACKBONE"),
    ):
        add_demo_tasks(repository)


@pytest.mark.parametrize(
    ("text", "part"),
    [("slots = 0", "slots"), ("colour = 1", "colour"), ("slots = ", "TOML"), ("demo = false", "--backbone")],
)
def test_bad_options_are_named(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "jpets.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=part):
        read_options({"demo": True} if "demo" not in text else {}, file)
    with pytest.raises(InvalidInput, match="no such file"):
        read_options({}, tmp_path / "other.toml")


def test_the_interval_of_balancing_is_the_operators(backbone: Any, tmp_path: Path) -> None:
    given = {"start": 3.0, "least": 1.0, "most": 7.0, "step": 0.25, "threshold": 0.8}
    how = {"demo": True, "devices": "2", "reserve": "never", "cache_dir": tmp_path}
    options = read_options(how | {f"balance_{name}": value for name, value in given.items()})
    assert options.balance_interval() == AdaptiveInterval(**given)
    assert read_options({"demo": True}).balance_interval() == AdaptiveInterval()
    for migrate, interval in ((True, 3.0), (False, math.inf)):
        serving = make_engine(options.model_copy(update={"migrate": migrate}), backbone, tuple, {})
        assert isinstance(serving, StudentServing)
        group = serving.engine
        assert isinstance(group, EngineGroup)
        assert (group.balancer.interval, group.balancer.watches) == (interval, migrate)
    with pytest.raises(InvalidInput, match="least <= start <= most"):
        read_options({"demo": True, "balance_start": 0.1})


def test_no_room_is_made_for_a_method_that_the_backbone_cannot_have() -> None:
    """Bits of 300 outputs fill no whole bytes."""
    config = dataclasses.replace(NAMED_BACKBONES["minilm-l6"], hidden_size=300, layers=1)
    backbone = types.SimpleNamespace(name="odd", config=config, fingerprint="sha256:0")
    made = standard_tasks(backbone)
    assert [task.id for task in made] == [f"standard-{name}" for name in standard_methods() if name != "mask"]
    for method in ("mask", "onebit"):
        with pytest.raises(InvalidTask, match=f"{method}: expected a backbone with outputs of query in multiples of 8"):
            METHODS[method].init(np.random.default_rng(0), METHODS[method].usual, config, 0.1)
        with pytest.raises(InvalidTask, match="multiples of 8, found 300"):
            METHODS[method].tensors({}, config)
        with pytest.raises(InvalidTask, match="multiples of 8, found 300"):
            checked_settings(method, {}, config)  # before any training


def test_standard_tasks_make_room_for_the_methods_of_pets(backbone: Any) -> None:
    tasks = standard_tasks(backbone)
    assert [task.deltas[0].method for task in tasks] == list(standard_methods())
    assert all(lower_task(task, backbone.config) for task in tasks)
    classes = [part.key for task in tasks for part in lower_task(task, backbone.config)]
    tensors = {"kernel": np.zeros((backbone.config.hidden_size, 2)), "bias": np.zeros(2)}
    questions = Task("questions", backbone.ref(), (), Head("question-answering", tensors))
    assert all(tightest(part.key, classes) for part in lower_task(questions, backbone.config))
