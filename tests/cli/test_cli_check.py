from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from runs import MakeTask, Run

from checkpoints.task_file import write_task


@pytest.fixture
def broken_file(task_file: Path) -> Path:
    """Three things are wrong: two tensors and the labels."""
    data = task_file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = safetensors.numpy.load(data)
    tensors["delta/0/lora/query/A"] = np.full_like(tensors["delta/0/lora/query/A"], np.nan)
    tensors["head/kernel"] = tensors["head/kernel"][:, :2].copy()
    path = task_file.with_name("broken.safetensors")
    safetensors.numpy.save_file(tensors, path, metadata)
    return path


def test_a_good_file_is_summed_up(run: Run, task_file: Path) -> None:
    result = run("task", "check", task_file)
    assert result.exit_code == 0
    assert "lora at query, value; layers 0 to 1; ranks 4; 2,048 numbers" in result.stdout
    assert "sequence-classification, single-label, cls pooling, 3 outputs" in result.stdout
    assert "label-0, label-1, label-2" in result.stdout
    assert f"({task_file.stat().st_size} bytes)" in result.stdout
    assert "--backbone checks shapes and fingerprint too" in result.stdout


def test_a_head_that_answers_questions(run: Run, make_task: MakeTask, tmp_path: Path) -> None:
    file = tmp_path / "questions.safetensors"
    write_task(make_task("questions", "question-answering", outputs=2), file)
    result = run("task", "check", file)
    assert result.exit_code == 0
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert ["head", "question-answering, 2 outputs"] in lines
    assert ["labels", "none"] in lines


def test_json_with_a_backbone(run: Run, task_file: Path, shallow_folder: Path) -> None:
    result = run("task", "check", task_file, "--backbone", shallow_folder, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (report["valid"], report["complete"], report["problems"]) == (True, True, [])
    assert report["deltas"][0]["sites"] == ["query", "value"]
    assert report["deltas"][0]["settings"]["ranks"] == {"query": [4, 4], "value": [4, 4]}


def test_every_problem_has_its_line(run: Run, broken_file: Path) -> None:
    result = run("task", "check", broken_file)
    assert result.exit_code == 1
    assert result.stdout == ""
    first, *problems = result.stderr.splitlines()
    assert first == f"error: broken.safetensors: {len(problems)} problems"
    assert any("delta/0/lora/query/A: expected finite numbers, found NaN" in line for line in problems)
    assert any("labels: expected 2" in line for line in problems)


def test_problems_as_json(run: Run, broken_file: Path) -> None:
    result = run("task", "check", broken_file, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not report["valid"]
    assert len(report["problems"]) == 3


def test_another_backbone(run: Run, task_file: Path, fixtures: Path) -> None:
    result = run("task", "check", task_file, "--backbone", fixtures / "tiny-distilbert")
    assert result.exit_code == 1
    assert "1 problem\n" in result.stderr
    assert "with fingerprint sha256:" in result.stderr


def test_a_file_of_anything(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no tensors here")
    result = run("task", "check", tmp_path / "notes.txt")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: notes.txt: 1 problem\n")
