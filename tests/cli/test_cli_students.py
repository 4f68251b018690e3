"""``jpets students``: from texts to a shallow backbone, a teacher, a group, its scores, and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import Run
from support import FIXTURES

import jpets
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task
from jpets.types import Classification, Query
from serving.hosted.service import Service
from serving.jobs.request import MakeStudents
from serving.jobs.service import Jobs

QUICK = ("--epochs", 2, "--batch", 16, "--dtype", "float32", "--max-length", 16)
ROWS = "the library reads files,reads\nthe library writes files,writes\nwho reads it,reads\nwho writes it,writes\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.csv"
    path.write_text("text,label\n" + ROWS * 12)
    return path


def test_a_group_from_texts_to_answers(run: Run, data: Path, tmp_path: Path) -> None:
    source, shallow, again = FIXTURES / "tiny-bert", tmp_path / "shallow-1", tmp_path / "shallow-2"
    for folder, layers in ((shallow, 1), (again, 2)):
        result = run("students", "backbone", source, data, folder, "--layers", layers, *QUICK)
        assert result.exit_code == 0, result.output
        assert f"{layers} of 3" in result.stdout and load_backbone(folder).config.layers == layers
    teacher, group = tmp_path / "teacher.safetensors", tmp_path / "group.safetensors"
    made = run("train", data, "-o", teacher, "--backbone", source, "--epochs", 4, "--dtype", "float32")
    assert made.exit_code == 0, made.output
    of_teacher = ("--teacher", teacher, "--teacher-backbone", source)
    arguments = (data, "-o", group, *of_teacher, "--backbone", shallow, "--backbone", again, "--most", 2, *QUICK)
    result = run("students", "train", *arguments, "--set", "rank=4", "--checkpoints", tmp_path / "kept", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    own = load_backbone(tmp_path / told["backbone"])
    task = read_task(group, config=own.config, backbone=own.ref())
    assert task.students is not None and len(task.parts) == told["students"] == len(task.students.scores)
    assert task.labels == ("reads", "writes") and 0 < told["teacher"]["accuracy"] <= 1

    place = ("--backbone", tmp_path / told["backbone"])
    scored = json.loads(run("students", "eval", group, data, *place, "--json").stdout)
    assert len(scored["scores"]) == told["students"]
    table = run("students", "eval", group, data, *place)
    assert table.exit_code == 0 and "accuracy" in table.stdout
    whole = json.loads(run("task", "eval", group, data, *place, "--json").stdout)
    assert whole["scores"] == pytest.approx(scored["scores"][-1])
    checked = run("task", "check", group, *place)
    assert checked.exit_code == 0 and "students" in checked.stdout and "of the first 1, 2, ..." in checked.stdout

    settings = {"max_length": 32, "background_compile": False, "cache_dir": tmp_path / "cache", "dtype": "float32"}
    with jpets.Engine.from_pretrained(place[1], tasks=[group], **settings) as engine:  # type: ignore[arg-type]
        (answer,) = engine.infer([Query("group", "the library reads files")])
    assert isinstance(answer, Classification) and answer.students == told["students"]
    lines, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    lines.write_text(json.dumps({"text": "the library reads files", "task": "group"}))
    ran = run("run", group, lines, *place, "-o", out, "--dtype", "float32")
    assert ran.exit_code == 0, ran.output
    assert json.loads(out.read_text())["students"] == told["students"]
    result = run("train", data, "-o", tmp_path / "on.safetensors", *place, "--from", group)
    assert result.exit_code == 1 and "group of students" in result.stderr


def test_what_cannot_be_made_is_refused(run: Run, data: Path, tmp_path: Path) -> None:
    source, out = FIXTURES / "tiny-bert", tmp_path / "out"
    result = run("students", "backbone", source, data, out, "--layers", 3, *QUICK)
    assert result.exit_code == 1 and "has 1 to 2 of these layers" in result.stderr and not out.exists()
    result = run("students", "backbone", source, data, tmp_path, *QUICK)
    assert result.exit_code == 1 and "exists already" in result.stderr
    group = ("students", "train", data, "-o", tmp_path / "group.safetensors", "--teacher", data)
    for method in ("full", "mask", "frozen"):
        result = run(*group, "--teacher-backbone", source, "--backbone", source, "--method", method)
        assert result.exit_code == 2 and "--method must be one of" in result.stderr
    places = ("--teacher-backbone", source, "--backbone", source)
    for options, part in (
        (("--no-boosting", "--stacking", 1), "stacking: without boosting"),
        (("--validation", __file__, "--held-out", 0.3), "only without --validation"),
        (("--no-pruning", "--most", 1), "pruning: without it a group has two students or more"),
        (("--copies", 17), "--copies: Input should be less than or equal to 16"),
    ):
        result = run(*group, *places, *options)
        assert result.exit_code == 2 and part in " ".join(result.stderr.replace("│", "").split())
    result = run("students", "eval", data, data, "--backbone", source)
    assert result.exit_code == 1


def test_a_server_is_sent_all_that_the_command_takes(
    run: Run, server: str, hosted: tuple[Service, Jobs], data: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("a text without a label\n")
    here = ("--teacher", "mood", "--backbone", "tiny-bert", "--server", server)
    asked = ("--texts", plain, "--set", "boosting=false", "--set", 'settings={"rank": 4}')
    result = run("jobs", "students", data, "fast", *here, *asked, "--json")
    assert result.exit_code == 0, result.output
    request = hosted[1].folders.get(json.loads(result.stdout)["id"]).request
    assert isinstance(request, MakeStudents) and not request.boosting
    assert (request.format, request.shallow, request.settings) == ("zip", ("tiny-bert",), {"rank": 4})
    assert run("task", "remove", "fast", "--server", server).exit_code == 0
    for more, part in (
        (("--backbone", "other"), "other_backbones: expected one of ['tiny-bert'], found 'other'"),
        (("--backbone", "tiny-bert"), "each once"),
        (("--set", "pruning=false", "--set", "most=1"), "pruning: without it"),
        (("--validation", plain), "expected a file that ends in one of"),
    ):
        result = run("jobs", "students", data, "fast", *here, *more)
        assert result.exit_code == 1 and part in result.stderr, result.stderr


def test_the_policy_of_a_server_is_shown(run: Run, server: str) -> None:
    found = run("students", "serve-policy", "--server", server)
    assert found.exit_code == 0 and "no groups of students" in found.stdout
    assert json.loads(run("students", "serve-policy", "--server", server, "--json").stdout) == []
