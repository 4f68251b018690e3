"""Every test of a store runs against a repository's folder and against a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints.task_file import write_task


@pytest.fixture(autouse=True)
def tidy(run, store):
    """The server outlives a test; what the test added does not."""
    yield
    run("task", "remove", "topic", *store)


def test_a_task_lives_and_goes(run, store, task_file: Path, make_task, tmp_path: Path) -> None:
    added = run("task", "add", task_file, *store)
    assert (added.exit_code, added.stderr) == (0, "")
    first = json.loads(run("task", "show", "topic", *store, "--json").stdout)
    assert first["loaded"] == first["version"]
    assert (first["head"], first["labels"]) == ("sequence-classification", ["label-0", "label-1", "label-2"])
    assert first["metadata"]["deltas"][0]["method"] == "lora"

    listed = json.loads(run("task", "list", *store, "--json").stdout)
    (own,) = [task for task in listed if task["id"] == "topic"]
    assert own == {name: first[name] for name in ("id", "version", "backbone", "deltas", "head", "labels", "bytes")}

    other = tmp_path / "other.safetensors"
    write_task(make_task("topic", seed=7), other)
    assert run("task", "add", other, "--id", "topic", "--if-match", first["version"], *store).exit_code == 0
    late = run("task", "add", other, "--id", "topic", "--if-match", first["version"], *store)
    assert late.exit_code == 1
    assert "read it again and retry" in late.stderr

    back = run("task", "rollback", "topic", *store)
    assert back.stdout == f"rolled topic back to version {first['version']}\n"
    exported = tmp_path / "exported.safetensors"
    assert run("task", "export", "topic", exported, *store).exit_code == 0
    assert exported.read_bytes() == task_file.read_bytes()

    forward = run("task", "rollback", "topic", "--version", first["version"] + 1, *store)
    assert forward.exit_code == 0
    assert run("task", "export", "topic", exported, *store).exit_code == 0
    assert exported.read_bytes() == other.read_bytes()

    assert run("task", "remove", "topic", *store).stdout == "removed topic\n"
    gone = run("task", "show", "topic", *store)
    assert gone.exit_code == 1
    assert gone.stderr.startswith("error: task 'topic'")


def test_tables_for_people(run, store, task_file: Path) -> None:
    run("task", "add", task_file, *store)
    listed = run("task", "list", *store)
    assert listed.exit_code == 0
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("topic")]
    assert "lora" in line
    assert "label-0, label-1, label-2" in line
    assert "tiny-bert" in line
    shown = run("task", "show", "topic", *store)
    assert shown.exit_code == 0
    assert "sha256:" in shown.stdout


@pytest.mark.parametrize("command", [("show", "nobody"), ("remove", "nobody"), ("rollback", "nobody")])
def test_an_unknown_id_is_one_line(run, store, task_file: Path, command: tuple[str, str]) -> None:
    run("task", "add", task_file, *store)
    result = run("task", *command, *store)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "nobody" in result.stderr
    assert result.stderr.count("\n") == 1


def test_exporting_an_unknown_task_writes_nothing(run, store, task_file: Path, tmp_path: Path) -> None:
    run("task", "add", task_file, *store)
    assert run("task", "export", "nobody", tmp_path / "out", *store).exit_code == 1
    assert not (tmp_path / "out").exists()


def test_a_bad_file_changes_nothing(run, store, task_file: Path, tmp_path: Path) -> None:
    run("task", "add", task_file, *store)
    before = run("task", "list", *store, "--json").stdout
    (tmp_path / "bad.safetensors").write_bytes(task_file.read_bytes()[:-9])
    result = run("task", "add", tmp_path / "bad.safetensors", "--id", "topic", *store)
    assert result.exit_code == 1
    assert "not a whole safetensors file" in result.stderr
    assert run("task", "list", *store, "--json").stdout == before


def test_a_stem_that_is_no_id(run, store, task_file: Path) -> None:
    odd = task_file.rename(task_file.with_name("My Task.safetensors"))
    result = run("task", "add", odd, *store)
    assert result.exit_code == 1
    assert "task id must be" in result.stderr


def test_a_file_that_is_not_there_is_a_usage_error(run, store, tmp_path: Path) -> None:
    result = run("task", "add", tmp_path / "nothing.safetensors", *store)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
