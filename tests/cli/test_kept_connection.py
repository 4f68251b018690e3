"""Requests of a thread go over one connection, which is opened anew where it could not be used again."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs import Run

from jpets.app.commands.client import kept_connection
from jpets.app.commands.client.client import NoAnswer, Server
from jpets.app.commands.tasks.server_store import ServerStore
from jpets.errors import NotFound
from serving.protocols.schemas import TaskPage

PAGE = b'{"tasks": [], "next": null}'


class Counting(http.server.ThreadingHTTPServer):
    """Counts connections, and notes requests and their sizes. Answers under ``/cut`` are shorter than they say; under
    ``/close`` the connection is closed without a word."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.seen: list[tuple[str, str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counting

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def answer(self) -> None:
        size = len(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self.server.seen.append((self.command, self.path, size))
        unknown = b'{"error": {"code": "not_found", "message": "no such task"}}'
        content = unknown if "unknown" in self.path else PAGE
        self.send_response(404 if content is unknown else 200)
        self.send_header("Content-Length", str(len(content) + 9 * ("cut" in self.path)))
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = "cut" in self.path or "close" in self.path

    do_GET = do_PUT = do_POST = answer

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


@pytest.fixture
def counting() -> Iterator[Counting]:
    with Counting() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_all_requests_go_over_one_connection(counting: Counting, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(300_000))
    with Server(counting.url) as server:
        for _ in range(3):
            server.ask(TaskPage, "GET", "/tasks")
            server.upload(TaskPage, "/tasks/one", file, {})
            server.ask(TaskPage, "POST", "/tasks", {"a": 1})
            with pytest.raises(NotFound, match="no such task"):
                server.download("/unknown")
    assert counting.connections == 1
    assert [size for method, _, size in counting.seen if method == "PUT"] == [300_000] * 3


def test_an_answer_that_is_not_read_yet_is_left_alone(counting: Counting) -> None:
    """By other threads: each has a connection."""
    with Server(counting.url) as server, ThreadPoolExecutor(1) as pool:
        with server._opener.open(f"{counting.url}/tasks") as unread:
            for _ in range(2):
                pool.submit(server.ask, TaskPage, "GET", "/tasks").result(30)
            assert unread.read() == PAGE
        server.ask(TaskPage, "GET", "/tasks")
    assert counting.connections == 2


def test_without_with_each_request_has_its_own(counting: Counting) -> None:
    server = Server(counting.url)
    for _ in range(2):
        server.ask(TaskPage, "GET", "/tasks")
    assert counting.connections == 2


@pytest.mark.parametrize("reason", ["closed", "idle", "cut"])
def test_a_connection_that_cannot_be_used_again_is_opened_anew(
    counting: Counting, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with Server(counting.url) as server:
        if reason == "cut":
            with pytest.raises(NoAnswer):
                server.ask(TaskPage, "GET", "/cut")
        else:
            server.ask(TaskPage, "GET", "/close" if reason == "closed" else "/tasks")
        if reason == "idle":
            monkeypatch.setattr(kept_connection, "IDLE", -1.0)
        if reason == "closed":
            ((connection, _),) = server._kept._kept.values()
            while not kept_connection._is_readable(connection):
                pass
        server.ask(TaskPage, "GET", "/tasks")
    assert counting.connections == 2


def test_a_proxy_of_the_environment_is_used(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", counting.url)
    monkeypatch.delenv("no_proxy", raising=False)
    with Server("http://jpets.invalid:8080") as server:
        for _ in range(2):
            server.ask(TaskPage, "GET", "/tasks")
    assert counting.connections == 1
    assert [path for _, path, _ in counting.seen] == ["http://jpets.invalid:8080/tasks"] * 2


def test_many_files_over_few_connections(run: Run, counting: Counting, task_file: Path, tmp_path: Path) -> None:
    """No answer is a jpets server's: that is reported for each file, and the next one is still tried."""
    files = [tmp_path / f"task-{number}.safetensors" for number in range(12)]
    for file in files:
        file.write_bytes(task_file.read_bytes())
    result = run("task", "add", *files, "--server", counting.url)
    assert result.exit_code == 1
    assert result.stderr.count("is not that of a jpets server") == 12
    assert counting.connections <= ServerStore.at_once


def test_many_files_and_nobody_there(run: Run, closed_port: int, task_file: Path) -> None:
    twin = task_file.with_name("twin.safetensors")
    twin.write_bytes(task_file.read_bytes())
    result = run("task", "add", task_file, twin, "--server", f"http://127.0.0.1:{closed_port}")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no answer from" in result.stderr
