"""``jpets key`` and ``jpets tenant``, and commands that send a key."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from listening import listening
from runs import Run

from checkpoints.access import Access
from checkpoints.catalog import Catalog
from serving.app import create_app
from serving.hosted.service import Service
from serving.jobs.service import Jobs
from serving.tenants.keyring import Keyring


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    catalog = Catalog(tmp_path / "keys.sqlite")
    yield Keyring(Access(catalog))
    catalog.close()


@pytest.fixture
def closed(hosted: tuple[Service, Jobs], keyring: Keyring) -> Iterator[str]:
    """The URL of a server that may have keys."""
    service, jobs = hosted
    with listening(create_app(service, training=jobs, keyring=keyring)) as url:
        yield url


@pytest.fixture(params=["repository", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Where keys are kept."""
    if request.param == "repository":
        return "--repository", str(tmp_path / "repository")
    return "--server", request.getfixturevalue("closed")


def test_keys_are_made_listed_and_revoked(run: Run, place: tuple[str, str]) -> None:
    first = run("key", "create", "--scope", "admin", *place)
    assert first.exit_code == 0 and "the first key" in first.stderr
    admin = {"JPETS_KEY": first.stdout.strip()}
    asked = ("--tenant", "acme", "--default-task", "mood", "--note", "robot", "--json")
    made = json.loads(run("key", "create", *asked, *place, env=admin).stdout)
    assert (made["tenant"], made["scopes"], made["default_task"], made["note"]) == ("acme", ["infer"], "mood", "robot")
    listed = json.loads(run("key", "list", "--json", *place, env=admin).stdout)
    assert [key["tenant"] for key in listed] == ["default", "acme"] and "key" not in listed[0]
    table = run("key", "list", *place, env=admin).stdout
    assert made["id"] in table and made["key"] not in table
    assert "is revoked" in run("key", "revoke", made["id"], *place, env=admin).stdout
    assert run("key", "revoke", "nothing", *place, env=admin).exit_code == 1
    limited = run("tenant", "limit", "acme", "--requests", 60, "--priority", 2, *place, env=admin)
    assert limited.stdout == "acme: 60 requests a minute, any tokens a minute, priority 2\n"
    tenants = json.loads(run("tenant", "list", "--json", *place, env=admin).stdout)
    assert {each["name"]: each["keys"] for each in tenants}["acme"] == 0
    assert run("tenant", "limit", "acme", "--requests", -1, *place, env=admin).exit_code == 1


def test_a_first_key_that_cannot_make_others_is_told(run: Run, tmp_path: Path) -> None:
    assert "scope admin" in run("key", "create", "--repository", tmp_path).stderr
    assert run("key", "create", "--scope", "root", "--repository", tmp_path).exit_code == 1


def test_commands_send_the_key_of_the_environment(run: Run, closed: str) -> None:
    key = run("key", "create", "--scope", "infer", "--scope", "admin", "--server", closed).stdout.strip()
    refused = run("query", "mood", "fine", "--server", closed)
    assert refused.exit_code == 1 and "a key is needed" in refused.stderr
    assert run("query", "mood", "fine", "--server", closed, env={"JPETS_KEY": key}).exit_code == 0
    assert run("task", "list", "--server", closed, env={"JPETS_KEY": key}).exit_code == 0
    wrong = run("task", "list", "--server", closed, env={"JPETS_KEY": key[:-2]})
    assert wrong.exit_code == 1 and key[:-2] not in wrong.output
    assert "tenant" not in run("task", "list", "--server", closed, env={"JPETS_KEY": key}).stdout
    forbidden = run("task", "remove", "mood", "--server", closed, env={"JPETS_KEY": key})
    assert forbidden.exit_code == 1 and "scope manage" in forbidden.stderr


def test_tasks_of_a_tenant_in_a_repository(run: Run, task_file: Path, tmp_path: Path) -> None:
    place = ("--repository", tmp_path / "repository")
    assert run("task", "add", task_file, "--tenant", "acme", *place).exit_code == 0
    assert json.loads(run("task", "list", "--json", *place).stdout) == []
    (listed,) = json.loads(run("task", "list", "--tenant", "acme", "--json", *place).stdout)
    assert (listed["id"], listed["tenant"]) == ("topic", "acme")
    assert run("task", "show", "topic", *place).exit_code == 1
    assert run("task", "show", "topic", "--tenant", "acme", *place).exit_code == 0
    assert run("task", "remove", "topic", "--tenant", "acme", *place).exit_code == 0
    assert run("task", "list", "--tenant", "acme", "--server", "http://127.0.0.1:1").exit_code == 2
    assert run("task", "add", task_file, "--tenant", "No", *place).exit_code == 1


def test_a_key_that_is_none_is_not_shown(run: Run, closed: str) -> None:
    for key in ("jpets_abc_SECRET\rX", "jpets abc SECRET", "jpets_äbc_SECRET"):
        result = run("task", "list", "--server", closed, env={"JPETS_KEY": key})
        assert result.exit_code == 1 and "JPETS_KEY" in result.stderr and "SECRET" not in result.output
    assert run("task", "list", "--server", closed, env={"JPETS_KEY": "\n"}).exit_code == 0, "none at all"


def test_another_host_does_not_get_the_key(run: Run) -> None:
    seen: list[str | None] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    class Sends(Elsewhere):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{other.server_port}/")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sends) as first,
    ):
        threads = [threading.Thread(target=each.serve_forever, args=(0.01,)) for each in (other, first)]
        for thread in threads:
            thread.start()
        run("task", "list", "--server", f"http://127.0.0.1:{first.server_port}", env={"JPETS_KEY": "jpets_a_b"})
        for each in (other, first):
            each.shutdown()
        for thread in threads:
            thread.join()
    assert seen == [None]


def test_keys_of_a_database(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"
    made = run("key", "create", "--repository", tmp_path / "repository", env={"JPETS_CATALOGUE": url})
    assert made.exit_code == 0, made.output
    with contextlib.closing(Catalog(url)) as catalog:
        assert len(Access(catalog).known().keys) == 1
    assert not (tmp_path / "repository" / "catalog.sqlite").exists()


def test_a_folder_with_a_catalogue_is_not_taken_for_its_files_alone(run: Run, tmp_path: Path, task_file: Path) -> None:
    """Its files would be looked up, and collected, by the other catalogue."""
    folder, env = tmp_path / "backup", {"JPETS_CATALOGUE": f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"}
    assert run("task", "add", task_file, "--repository", folder).exit_code == 0
    refused = run("task", "list", "--repository", folder, env=env)
    assert refused.exit_code != 0 and "has a catalogue of its own" in refused.output
    assert run("task", "list", "--repository", folder).exit_code == 0


def test_a_list_of_own_and_shared_tasks_says_whose_they_are(run: Run, closed: str, task_file: Path) -> None:
    admin = {"JPETS_KEY": run("key", "create", "--scope", "admin", "--server", closed).stdout.strip()}
    asked = ("--tenant", "acme", "--scope", "manage", "--server", closed)
    acme = {"JPETS_KEY": run("key", "create", *asked, env=admin).stdout.strip()}
    assert run("task", "add", task_file, "--id", "own", "--server", closed, env=acme).exit_code == 0
    listed = run("task", "list", "--server", closed, env=acme).stdout
    assert "tenant" in listed and "acme" in listed and "default" in listed
    assert run("task", "remove", "own", "--server", closed, env=acme).exit_code == 0
