"""``jpets task import``: adapters as they are, extractions from fine-tuned models."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_model import biases, ranked, write_full
from runs import Run
from support import FIXTURES, tiny

from checkpoints.imports.extract import Extraction
from checkpoints.task_file import read_task
from jpets.app.jobs.extraction import Candidate
from jpets.training.predict import agreement, agreement_by_label, varies
from jpets.types import Head, HeadType, Preprocessing, Problem

LORA = FIXTURES / "imports" / "peft" / "lora"
BACKBONE = FIXTURES / "tiny-bert"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"a library for reading files, part {at} of many\n" for at in range(40)))
    return path


def test_an_adapter_becomes_a_task_file(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "own.safetensors"
    options = ("--labels", "x, y, z", "--max-length", 64, "--truncation-strategy", "only_second")
    result = run("task", "import", LORA, "-o", out, "--backbone", BACKBONE, *options)
    assert result.exit_code == 0, result.stderr
    assert "lora at query, value" in result.stdout and "x, y, z" in result.stdout
    task = read_task(out, config=tiny().config, backbone=tiny().ref())
    assert "cut to 64 tokens, pairs cut by only_second" in result.stdout
    assert task.labels == ("x", "y", "z")
    assert task.preprocessing == Preprocessing(64, True, truncation_strategy="only_second")


def test_an_archive_and_another_backbone_name(run: Run, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        for path in LORA.iterdir():
            archive.write(path, f"own/{path.name}")
    renamed = tmp_path / "other-name"
    shutil.copytree(BACKBONE, renamed)
    result = run(
        "task", "import", tmp_path / "own.zip", "-o", tmp_path / "t.safetensors", "--backbone", renamed, "--json"
    )
    report = json.loads(result.stdout)
    assert report["valid"] and "'tiny-bert'" in report["notes"][0]


def test_a_refusal_writes_nothing(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "own.safetensors"
    for arguments, message in (
        ((LORA, "--labels", "x,y"), "labels: expected 3"),
        ((LORA, "--pooling", "mean"), "pooling: expected none"),
        ((LORA.parents[1] / "adapters" / "seq-bn", "--head", "embedding"), "head: expected sequence-classification"),
        ((LORA.parent / "lora-answers", "--labels", "x,y"), "labels: expected none"),
        ((write_full(tmp_path / "full", biases),), "say --method"),
        ((write_full(tmp_path / "full", biases), "--method", "auto"), "give --texts"),
        ((tmp_path,), "expected adapter_config.json"),
        ((tmp_path / "nowhere",), "is no folder and no file"),
    ):
        result = run("task", "import", *arguments, "-o", out, "--backbone", BACKBONE)
        assert (result.exit_code, message in result.stderr) == (1, True), result.stderr
        assert not out.exists()
    result = run("task", "import", LORA, "-o", tmp_path / "own.bin", "--backbone", BACKBONE)
    assert result.exit_code == 2 and "must be a file that ends in .safetensors" in result.stderr


def test_options_that_would_do_nothing_are_refused(run: Run, tmp_path: Path, texts: Path) -> None:
    full, out = write_full(tmp_path / "full", biases), tmp_path / "own.safetensors"
    for arguments, message in (
        ((LORA, "--method", "diff"), "--method: only for fully fine-tuned models"),
        ((LORA, "--texts", texts), "--texts: only for fully fine-tuned models"),
        ((full, "--method", "lora", "--density", 0.02), "--density: only with --method diff, found lora"),
        ((full, "--method", "diff", "--energy", 0.5), "--energy: only with --method lora, found diff"),
        ((full, "--method", "auto", "--texts", texts, "--rank", 16), "--rank: only with --method lora, found auto"),
        ((full, "--method", "bitfit", "--agreement", 0.5), "--agreement: only with --method auto, found bitfit"),
        ((full, "--method", "lora", "--energy", 0.5, "--rank", 4), "give --rank or --energy"),
        ((full, "--method", "bitfit", "--text-column", "a"), "--text-column: only with --texts"),
    ):
        result = run("task", "import", *arguments, "-o", out, "--backbone", BACKBONE)
        told = " ".join(result.stderr.replace("│", " ").split())
        assert (result.exit_code, message in told) == (2, True), result.stderr
        assert not out.exists()


def test_what_was_lost_is_reported(run: Run, tmp_path: Path, texts: Path) -> None:
    full = write_full(tmp_path / "full", ranked(6))
    out = tmp_path / "own.safetensors"
    arguments = ("--backbone", BACKBONE, "--method", "lora", "--texts", texts)
    result = run("task", "import", full, "-o", out, *arguments, "--rank", 2, "--json")
    found = json.loads(result.stdout)
    assert 0.1 < found["losses"]["layers/0/query/weight"] < 0.99 and found["losses"]["layers/0/query/bias"] < 1e-6
    whole = run("task", "import", full, "-o", out, *arguments, "--energy", 1.0).stdout
    assert "100.0 % of the answers" in whole and "/weight" in whole
    assert "says nothing: the model answers all of them alike" in whole
    assert f"the 8 of {len(found['losses'])} tensors that lost most" in whole


def test_auto_takes_the_smallest_that_agrees(run: Run, tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "own.safetensors"
    full = write_full(tmp_path / "full", biases)
    arguments = ("--backbone", BACKBONE, "--method", "auto", "--texts", texts)
    found = json.loads(run("task", "import", full, "-o", out, *arguments, "--json").stdout)
    assert (found["extraction"]["method"], found["agreement"]) == ("bitfit", 1.0)
    assert [delta.method for delta in read_task(out).deltas] == ["bitfit"]


def test_auto_wants_answers_that_differ(run: Run, tmp_path: Path, texts: Path) -> None:
    full, out = write_full(tmp_path / "full", ranked(6)), tmp_path / "own.safetensors"
    arguments = ("--backbone", BACKBONE, "--method", "auto", "--texts", texts)
    result = run("task", "import", full, "-o", out, *arguments)
    assert result.exit_code == 1 and "the model answers all 40 texts alike" in result.stderr and not out.exists()


def test_what_lost_a_label_does_not_agree() -> None:
    kernel = {"kernel": np.zeros((4, 2), np.float32), "bias": np.zeros(2, np.float32)}
    mostly, never = [np.array([1.0, 0.0])] * 99 + [np.array([0.0, 1.0])], [np.array([1.0, 0.0])] * 100
    tagged = [np.stack(mostly)], [np.stack(never)]
    shifted = [[each - 0.5 for each in side] for side in (mostly, never)]
    cases: list[tuple[Problem, HeadType, Any]] = [
        ("single-label", "sequence-classification", (mostly, never)),
        ("single-label", "token-classification", tagged),
        ("multi-label", "sequence-classification", shifted),
    ]
    for problem, kind, (own, other) in cases:
        head = Head(kind, kernel, problem=problem)
        each = agreement_by_label(own, other, head)
        assert agreement(own, other, head) >= 0.99 and each == [1.0, 0.0]
        found = Candidate(Extraction("bitfit"), (), {}, agreement(own, other, head), min(each), 100, True)
        assert not found.agrees(0.99) and dataclasses.replace(found, least=1.0).agrees(0.99)
        assert varies(own, head) and not varies(other, head)


def test_agreement_of_each_kind_of_head() -> None:
    a = [np.array([1.0, 2.0]), np.array([3.0, 1.0]), np.array([0.5, -1.0])]
    b = [np.array([2.0, 1.0]), np.array([2.0, 1.0]), np.array([1.0, -2.0])]
    kernel = {"kernel": np.zeros((4, 2), np.float32), "bias": np.zeros(2, np.float32)}
    assert agreement(a, b, Head("sequence-classification", kernel)) == pytest.approx(2 / 3)
    assert agreement(a, b, Head("sequence-classification", kernel, problem="multi-label")) == 1.0
    assert (
        agreement(a, [2 * each + 1 for each in a], Head("sequence-classification", kernel, problem="regression"))
        > 0.999
    )
    tokens = [np.array([[1.0, 0], [0, 1.0]]), np.array([[1.0, 0]])]
    other = [np.array([[1.0, 0], [1.0, 0]]), np.array([[2.0, 0]])]
    assert agreement(tokens, other, Head("token-classification", kernel)) == pytest.approx(2 / 3)
    assert agreement(a, [3 * each for each in a], Head("embedding")) == pytest.approx(1.0)
