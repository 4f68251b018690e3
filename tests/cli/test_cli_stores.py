"""Which store a command works on, and what it says where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import Run

from checkpoints import repository
from jpets.app.commands.tasks import server_store


def test_neither_store_is_a_usage_error(run: Run) -> None:
    result = run("task", "list")
    assert result.exit_code == 2
    assert "exactly one of --repository DIR and --server URL" in " ".join(result.stderr.split())


def test_both_stores_are_a_usage_error(run: Run, tmp_path: Path) -> None:
    result = run("task", "list", "--repository", tmp_path, "--server", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_both_variables_are_a_usage_error(run: Run, tmp_path: Path) -> None:
    env = {"JPETS_REPOSITORY": str(tmp_path), "JPETS_SERVER": "http://127.0.0.1:1"}
    assert run("task", "list", env=env).exit_code == 2


def test_a_variable_names_the_store(run: Run, task_file: Path, tmp_path: Path) -> None:
    env = {"JPETS_REPOSITORY": str(tmp_path / "repository")}
    assert run("task", "add", task_file, env=env).exit_code == 0
    assert [task["id"] for task in json.loads(run("task", "list", "--json", env=env).stdout)] == ["topic"]


def test_an_option_wins_over_the_other_ones_variable(run: Run, task_file: Path, tmp_path: Path) -> None:
    env = {"JPETS_SERVER": "http://127.0.0.1:1"}
    assert run("task", "add", task_file, "--repository", tmp_path / "repository", env=env).exit_code == 0


@pytest.mark.parametrize("command", [("list",), ("show", "topic"), ("remove", "topic"), ("rollback", "topic")])
def test_only_add_makes_a_repository(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    result = run("task", *command, "--repository", tmp_path / "mistyped")
    assert result.exit_code == 1
    assert "is not a task repository" in result.stderr
    assert not (tmp_path / "mistyped").exists()


def test_a_damaged_catalogue_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"no database" * 100)
    result = run("task", "list", "--repository", tmp_path)
    assert result.exit_code == 1
    assert "file is not a database" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("task", "list"), ("query", "topic", "text")])
def test_an_unreachable_server(run: Run, closed_port: int, command: tuple[str, ...]) -> None:
    result = run(*command, "--server", f"http://127.0.0.1:{closed_port}")
    assert result.exit_code == 1
    assert f"no answer from http://127.0.0.1:{closed_port} (Connection refused)" in result.stderr
    assert "python -m jpets.serve" in result.stderr


def test_a_url_without_a_scheme_is_a_usage_error(run: Run) -> None:
    assert run("task", "list", "--server", "127.0.0.1:8080").exit_code == 2


@pytest.mark.parametrize("path", ["", "/broken"])
def test_a_server_that_is_not_jpets(run: Run, foreign_server: str, path: str) -> None:
    result = run("task", "list", "--server", foreign_server + path)
    assert result.exit_code == 1
    assert "is not that of a jpets server" in result.stderr


def test_lists_go_over_all_pages(
    run: Run, server: str, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "PAGE", 2)
    monkeypatch.setattr(server_store, "PAGE", 2)
    for number in range(5):
        run("task", "add", task_file, "--id", f"task-{number}", "--repository", tmp_path / "repository")
    stored = json.loads(run("task", "list", "--json", "--repository", tmp_path / "repository").stdout)
    assert [task["id"] for task in stored] == [f"task-{number}" for number in range(5)]
    served = json.loads(run("task", "list", "--json", "--server", server).stdout)
    assert [task["id"] for task in served] == ["mood", "names", "price", "questions", "tags", "vectors"]


def test_a_variable_is_named_where_it_is_wrong(run: Run) -> None:
    result = run("query", "mood", "text", env={"JPETS_SERVER": "nonsense"})
    assert "JPETS_SERVER must be a URL" in result.stderr
    result = run("query", "mood", "text", "--server=nonsense", env={"JPETS_SERVER": "http://127.0.0.1:1"})
    assert "--server must be a URL" in result.stderr
    result = run("task", "list", env={"JPETS_REPOSITORY": "nowhere"})
    assert "nowhere is not a task repository" in result.stderr


def test_an_empty_path_is_not_the_working_folder(
    run: Run, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script's variable that is not set."""
    monkeypatch.chdir(tmp_path)
    for command in (
        ("task", "add", task_file),
        ("key", "create"),
        ("serve", "--demo", "--port", "0"),
        ("doctor",),
        ("repository", "restore", task_file),
    ):
        result = run(*command, "--repository", "")
        told = " ".join(result.stderr.replace("│", " ").split())
        assert result.exit_code and "--repository" in told and "expected a" in told, result.output
    assert not [path for path in tmp_path.iterdir() if path.name in ("blobs", "catalog.sqlite")]


def test_a_variable_that_a_command_does_not_read_is_not_named(run: Run, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    arguments = ("task", "import", adapter, "-o", tmp_path / "x.safetensors")
    result = run(*arguments, env={"JPETS_BACKBONE": "minilm"})
    assert result.exit_code == 1 and "give --backbone" in result.stderr


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://[::1", "must be a URL"),
        ("http://localhost:port", "must be a URL"),
        ("ftp://me:secret@host", "must be a URL"),
        ("http://me:secret@127.0.0.1:1", "without a user or password"),
    ],
)
def test_a_url_that_is_none_is_told_without_its_password(run: Run, url: str, told: str) -> None:
    result = run("jobs", "list", "--server", url)
    assert result.exit_code == 2 and "secret" not in result.output
    assert told in " ".join(result.stderr.replace("│", " ").split())


def test_numbers_beyond_a_column_are_refused(run: Run, task_file: Path, tmp_path: Path) -> None:
    kept = ("--repository", tmp_path / "repository")
    run("task", "add", task_file, *kept)
    assert run("task", "rollback", task_file.stem, "--version", 1 << 63, *kept).exit_code == 2
    for priority in (101, -101, 1 << 63):
        result = run("tenant", "limit", "acme", "--priority", priority, *kept)
        assert result.exit_code == 1 and "priority: expected -100 to 100" in result.stderr


def test_backup_and_restore(run: Run, task_file: Path, tmp_path: Path) -> None:
    used, kept = tmp_path / "used", tmp_path / "kept"
    run("task", "add", task_file, "--repository", used)
    run("task", "add", task_file, "--tenant", "acme", "--repository", used)
    assert "2 versions" in run("repository", "backup", kept, "--repository", used).stdout
    run("task", "remove", "topic", "--repository", used)
    run("task", "add", task_file, "--id", "since", "--repository", used)
    assert "2 versions" in run("repository", "restore", kept, "--repository", used).stdout
    again = run("repository", "restore", kept, "--repository", used).stdout
    assert "2 versions" in again and "rows that changed: 0" in again
    assert [each["id"] for each in json.loads(run("task", "list", "--json", "--repository", used).stdout)] == ["topic"]
    assert run("repository", "restore", tmp_path, "--repository", used).exit_code == 1
    assert run("repository", "backup", used, "--repository", used).exit_code == 1
