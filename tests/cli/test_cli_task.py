"""Every test of a store runs against a repository's folder and against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import MakeTask, Run, Store

from checkpoints.task_file import write_task


@pytest.fixture(autouse=True)
def tidy(run: Run, store: Store) -> Iterator[None]:
    """The server outlives a test; what the test added does not."""
    yield
    for name in ("topic", "one", "third"):
        run("task", "remove", name, *store)


def test_a_task_lives_and_goes(run: Run, store: Store, task_file: Path, make_task: MakeTask, tmp_path: Path) -> None:
    added = run("task", "add", task_file, *store)
    assert (added.exit_code, added.stderr) == (0, "")
    first = json.loads(run("task", "show", "topic", *store, "--json").stdout)
    assert first["loaded"] == first["version"]
    assert (first["head"], first["labels"]) == ("sequence-classification", ["label-0", "label-1", "label-2"])
    assert first["metadata"]["deltas"][0]["method"] == "lora"

    listed = json.loads(run("task", "list", *store, "--json").stdout)
    (own,) = [task for task in listed if task["id"] == "topic"]
    kept = ("id", "tenant", "version", "backbone", "deltas", "head", "labels", "bytes")
    assert own == {name: first[name] for name in kept}

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


def test_versions_have_names(run: Run, store: Store, task_file: Path) -> None:
    for _ in range(2):
        run("task", "add", task_file, *store)
    newest = json.loads(run("task", "show", "topic", *store, "--json").stdout)["version"]
    named = run("task", "alias", "topic", "stable", "--version", newest - 1, *store)
    assert named.stdout == f"stable is version {newest - 1} of topic\n"
    assert run("task", "alias", "topic", "tried", *store).stdout == f"tried is version {newest} of topic\n"
    assert "stable" in run("task", "show", "topic", *store).stdout
    back = run("task", "rollback", "topic", "--version", "stable", *store)
    assert back.stdout == f"rolled topic back to version {newest - 1}\n"
    assert run("task", "alias", "topic", "tried", "--remove", "--version", newest, *store).exit_code == 2
    assert run("task", "alias", "topic", "tried", "--remove", *store).exit_code == 0
    gone = run("task", "alias", "topic", "tried", "--remove", *store)
    assert gone.exit_code == 1 and "no alias 'tried'" in gone.stderr


def test_tables_for_people(run: Run, store: Store, task_file: Path) -> None:
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
    assert "from layer 0 on, of" in shown.stdout


@pytest.mark.parametrize("command", [("show", "nobody"), ("remove", "nobody"), ("rollback", "nobody")])
def test_an_unknown_id_is_one_line(run: Run, store: Store, task_file: Path, command: tuple[str, str]) -> None:
    run("task", "add", task_file, *store)
    result = run("task", *command, *store)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "nobody" in result.stderr
    assert result.stderr.count("\n") == 1


def test_exporting_an_unknown_task_writes_nothing(run: Run, store: Store, task_file: Path, tmp_path: Path) -> None:
    run("task", "add", task_file, *store)
    assert run("task", "export", "nobody", tmp_path / "out", *store).exit_code == 1
    assert not (tmp_path / "out").exists()


def test_a_bad_file_changes_nothing(run: Run, store: Store, task_file: Path, tmp_path: Path) -> None:
    run("task", "add", task_file, *store)
    before = run("task", "list", *store, "--json").stdout
    (tmp_path / "bad.safetensors").write_bytes(task_file.read_bytes()[:-9])
    result = run("task", "add", tmp_path / "bad.safetensors", "--id", "topic", *store)
    assert result.exit_code == 1
    assert "not a whole safetensors file" in result.stderr
    assert run("task", "list", *store, "--json").stdout == before


def test_a_stem_that_is_no_id(run: Run, store: Store, task_file: Path) -> None:
    odd = task_file.rename(task_file.with_name("My Task.safetensors"))
    result = run("task", "add", odd, *store)
    assert result.exit_code == 1
    assert "task id must be" in result.stderr


def test_a_file_that_is_not_there_is_a_usage_error(run: Run, store: Store, tmp_path: Path) -> None:
    result = run("task", "add", tmp_path / "nothing.safetensors", *store)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_versions_are_listed(run: Run, store: Store, task_file: Path, make_task: MakeTask, tmp_path: Path) -> None:
    run("task", "add", task_file, *store)
    first = json.loads(run("task", "show", "topic", *store, "--json").stdout)["version"]
    other = tmp_path / "other.safetensors"
    write_task(make_task("topic", "token-classification", seed=7), other)
    run("task", "add", other, "--id", "topic", *store)
    run("task", "add", other, "--id", "topic", *store)
    run("task", "rollback", "topic", "--version", first + 1, *store)
    kept = [first, first + 1, first + 2]

    found = json.loads(run("task", "versions", "topic", *store, "--json").stdout)
    assert [each["version"] for each in found] == kept
    assert [(each["state"], each["served"]) for each in found] == [
        ("active", False),
        ("active", True),
        ("withdrawn", False),
    ]
    assert [each["head"] for each in found] == ["sequence-classification", *["token-classification"] * 2]
    assert found[0]["digest"] != found[1]["digest"] == found[2]["digest"]
    shown = json.loads(run("task", "show", "topic", *store, "--json").stdout)
    assert (shown["versions"], shown["served"], shown["loaded"]) == (kept, first + 1, first + 1)

    table = [line.split() for line in run("task", "versions", "topic", *store).stdout.splitlines()][2:]
    assert [row[:2] for row in table if row] == [
        [str(version), state] for version, state in zip(kept, ("active", "served", "withdrawn"), strict=True)
    ]
    fields = run("task", "show", "topic", *store).stdout
    assert f"version {first + 1}\n" in fields and ", ".join(map(str, kept)) in fields
    unknown = run("task", "versions", "nobody", *store)
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (1, 1) and "nobody" in unknown.stderr


@pytest.fixture
def mixed_folder(tmp_path: Path, make_task: MakeTask) -> Path:
    """``one``, a broken ``second``, ``third``, a file of another kind, and a folder."""
    folder = tmp_path / "tasks"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("one", "third")):
        write_task(make_task(name, seed=number), folder / f"{name}.safetensors")
    (folder / "second.safetensors").write_bytes(b"no task")
    (folder / "notes.txt").write_text("no task either")
    return folder


def test_one_bad_file_of_many_does_not_stop_the_others(
    run: Run, store: Store, task_file: Path, mixed_folder: Path
) -> None:
    before = {task["id"] for task in json.loads(run("task", "list", *store, "--json").stdout or "[]")}
    result = run("task", "add", mixed_folder, task_file, mixed_folder / "one.safetensors", *store)
    assert result.exit_code == 1
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["one", "third", "topic"], "each once"
    bad, summary = result.stderr.splitlines()
    assert str(mixed_folder / "second.safetensors") in bad and "not a safetensors file" in bad
    assert summary == "error: 1 of 4 files failed"
    listed = {task["id"] for task in json.loads(run("task", "list", *store, "--json").stdout)}
    assert listed - before == {"one", "third", "topic"}


def test_many_files_that_are_all_well(run: Run, store: Store, mixed_folder: Path) -> None:
    (mixed_folder / "second.safetensors").unlink()
    result = run("task", "add", mixed_folder, *store)
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 2)
    again = run("task", "add", mixed_folder, "--if-match", 0, *store)
    assert again.exit_code == 1 and again.stdout == ""
    assert [("expected 0; read it again" in line) for line in again.stderr.splitlines()] == [True, True, False]


def test_files_that_cannot_be_told_apart(
    run: Run, store: Store, task_file: Path, mixed_folder: Path, tmp_path: Path
) -> None:
    named = run("task", "add", task_file, mixed_folder, "--id", "topic", *store)
    assert named.exit_code == 2 and "--id names one task" in " ".join(named.stderr.split())
    twin = task_file.rename(mixed_folder / "more" / "one.safetensors")
    result = run("task", "add", mixed_folder / "one.safetensors", twin, mixed_folder / "more", *store)
    assert result.exit_code == 1 and result.stdout.count("\n") == 1
    assert "expected each id once" in result.stderr and str(twin) in result.stderr
    twin.unlink()
    nothing = run("task", "add", mixed_folder / "more", *store)
    assert nothing.exit_code == 1 and "found no .safetensors file" in nothing.stderr
