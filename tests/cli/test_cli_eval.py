"""``jpets task eval`` of several task files: each is scored, on the texts of all or on its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import MakeTask, Run

from checkpoints.task_file import write_task
from jpets.app.commands.tasks.eval import texts_of
from jpets.errors import InvalidInput, NotFound

ROWS = "text,label\n" + "".join(f"some text {number},label-{number % 3}\n" for number in range(12))


@pytest.fixture
def tasks(tmp_path: Path, make_task: MakeTask) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for seed, name in enumerate(("one", "two")):
        write_task(make_task(name, seed=seed), folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def evaluate(run: Run, shallow_folder: Path) -> Run:
    return lambda *arguments: run("task", "eval", *arguments, "--backbone", shallow_folder)


def test_each_of_many_is_scored(evaluate: Run, tasks: Path, tmp_path: Path) -> None:
    data = tmp_path / "test.csv"
    data.write_text(ROWS)
    alone = [json.loads(evaluate(tasks / f"{name}.safetensors", data, "--json").stdout) for name in ("one", "two")]
    assert all(each["texts"] == 12 for each in alone) and alone[0] != alone[1]
    together = evaluate(tasks, data, "--json")
    assert together.exit_code == 0
    names = [str(tasks / f"{name}.safetensors") for name in ("one", "two")]
    assert json.loads(together.stdout) == [{"file": name, **own} for name, own in zip(names, alone, strict=True)]
    lines = evaluate(tasks / "two.safetensors", tasks, data).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == names[::-1]
    assert f"accuracy {alone[0]['scores']['accuracy']:.4f}" in lines[1]


def test_one_bad_file_of_many_does_not_stop_the_others(evaluate: Run, tasks: Path, tmp_path: Path) -> None:
    """A file that is no task, one of another backbone's, and one without texts of its own."""
    own = tmp_path / "texts"
    own.mkdir()
    for name in ("bad", "two", "other"):
        (own / f"{name}.csv").write_text(ROWS)
    (tasks / "bad.safetensors").write_bytes(b"no task")
    result = evaluate(tasks, own, "--json")
    assert result.exit_code == 1
    found = {Path(each["file"]).stem: each for each in json.loads(result.stdout)}
    assert found["two"]["texts"] == 12 and "not a safetensors file" in found["bad"]["problem"]
    assert "expected one.csv or another file of texts" in found["one"]["problem"]
    assert result.stderr.splitlines()[-1] == "error: 2 of 3 files failed"
    people = evaluate(tasks, own)
    assert people.exit_code == 1 and people.stdout.count("\n") == 1 and people.stderr.count("\n") == 3


def test_which_texts_belong_to_a_task(tmp_path: Path) -> None:
    task, folder = tmp_path / "mood.safetensors", tmp_path / "texts"
    (folder / "mood").mkdir(parents=True)
    assert texts_of(task, tmp_path / "test.csv") == tmp_path / "test.csv"
    assert texts_of(task, folder) == folder / "mood", "of the datasets library"
    (folder / "mood.jsonl").touch()
    with pytest.raises(InvalidInput, match=r"expected one file of texts, found \['mood.jsonl', 'mood'\]"):
        texts_of(task, folder)
    with pytest.raises(NotFound, match=r"expected topic.csv"):
        texts_of(tmp_path / "topic.safetensors", folder)
    (folder / "state.json").touch()
    assert texts_of(task, folder) == folder, "the datasets library wrote it"
