"""``jpets train`` and ``jpets task eval``: from labelled texts to a task file and its scores."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Run
from support import FIXTURES, tiny

from checkpoints import task_file
from checkpoints.task_file import read_task
from jpets.app.commands.training.command import settings_of
from jpets.errors import OutOfSpace
from jpets.training import many
from jpets.training.session import Result
from jpets.types import Task

BACKBONE = FIXTURES / "tiny-bert"


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    words = {"good": ["library", "module"], "bad": ["game", "sound"]}
    lines = [f"{' '.join(rng.choice(words[label], 12))},{label}" for label in rng.choice(["good", "bad"], 64)]
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["review,verdict", *lines]) + "\n")
    return path


def test_a_task_is_trained_written_and_scored(run: Run, tmp_path: Path, reviews: Path) -> None:
    out = tmp_path / "reviews.safetensors"
    columns = ("--text", "review", "--label", "verdict", "--backbone", BACKBONE)
    options = (
        "--method",
        "bitfit",
        "--epochs",
        4,
        "--batch",
        8,
        "--rate",
        0.02,
        "--head-rate",
        0.02,
        "--max-length",
        16,
    )
    result = run("train", reviews, "-o", out, *columns, *options, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["scores"]["accuracy"] > 0.9 and report["losses"][-1] < report["losses"][0]
    task = read_task(out, config=tiny().config, backbone=tiny().ref())
    assert (task.labels, [delta.method for delta in task.deltas]) == (("bad", "good"), ["bitfit"])
    scored = run("task", "eval", out, reviews, *columns, "--json")
    assert json.loads(scored.stdout)["scores"]["accuracy"] > 0.9
    assert json.loads(scored.stdout)["texts"] == 64


def test_bad_input_is_told_and_nothing_is_written(run: Run, tmp_path: Path, reviews: Path) -> None:
    one = tmp_path / "one.csv"
    one.write_text("review,verdict\na,good\nb,good\n")
    empty = tmp_path / "empty.csv"
    empty.write_text("review,verdict\n")
    out = tmp_path / "x.safetensors"
    for data, more, message, code in (
        (reviews, ("--label", "stars"), "expected a column 'stars'", 1),
        (one, ("--label", "verdict"), "at least two labels", 1),
        (empty, ("--label", "verdict"), "at least one row", 1),
        (reviews, ("--label", "verdict", "--set", "rank"), "--set must be NAME=VALUE", 2),
        (reviews, ("--label", "verdict", "--sweep", "rate=1"), "a sweep must be rate=LOW..HIGH", 1),
        (reviews, ("--label", "verdict", "--sweep", "1e-4..1e-3", "--rate", 1e-3), "not both", 2),
        (reviews, ("--label", "verdict", "--pooling", "cls", "--from", "x"), "keeps its own", 2),
        (reviews, ("--label", "verdict", "--set", "rank=1000000000"), "rank must be a whole number up to", 1),
        (reviews, ("--validation", one, "--held-out", 0.3), "--held-out: only without --validation", 2),
        (reviews, ("--label", "verdict", "--server", "http://127.0.0.1:1"), "--server: only with --task", 2),
    ):
        result = run("train", data, "-o", out, "--text", "review", "--backbone", BACKBONE, *more)
        assert result.exit_code == code and message in result.stderr, result.stderr
        assert not out.exists()
    before = reviews.read_bytes()
    for name, message in (
        (reviews, "must be a file that ends in .safetensors"),
        (tmp_path / "nowhere" / "x.safetensors", "there is no folder"),
        (tmp_path / "My Task!.safetensors", "task id must be"),
    ):
        result = run("train", reviews, "-o", name, "--backbone", BACKBONE)
        assert result.exit_code and message in " ".join(result.stderr.replace("│", " ").split()), result.stderr
    assert reviews.read_bytes() == before
    task = FIXTURES.parents[1] / "checkpoints" / "demo" / "topic.safetensors"
    result = run("task", "eval", task, reviews, "--text", "review", "--label", "verdict", "--backbone", BACKBONE)
    assert result.exit_code == 1 and "fingerprint" in result.stderr


def test_settings_are_read() -> None:
    given = ["rank=16", "sites=query,value", "placement=pfeiffer", "price=1e-7", "sites=ffn_in"]
    assert settings_of(given[:4]) == {"rank": 16, "sites": ["query", "value"], "placement": "pfeiffer", "price": 1e-7}
    assert settings_of(given[4:]) == {"sites": ["ffn_in"]}
    assert settings_of(["layers=1,2"]) == {"layers": [1, 2]} and settings_of(["layers=1"]) == {"layers": [1]}
    assert settings_of(['sites=["query"]']) == {"sites": ["query"]}


def test_of_several_files_each_makes_a_task(run: Run, tmp_path: Path, reviews: Path) -> None:
    other, out = tmp_path / "Prices.csv", tmp_path / "tasks"
    rows = [f"a library of {'many ' * (at % 8)}functions,{at % 8 + 0.5}" for at in range(32)]
    other.write_text("\n".join(["review,verdict", *rows]) + "\n")
    columns = ("--text", "review", "--label", "verdict", "--backbone", BACKBONE, "--dtype", "float32")
    options = ("--epochs", 1, "--batch", 8, "--max-length", 16, "--method")
    result = run("train", reviews, other, "-o", out, *columns, *options, "ia3", "--json")
    assert result.exit_code == 0, result.output
    tasks = json.loads(result.stdout)["tasks"]
    assert [each["file"] for each in tasks] == ["reviews.safetensors", "prices.safetensors"]
    assert [sorted(each["scores"])[0] for each in tasks] == ["accuracy", "pearson"]
    made = {path.stem: read_task(path, config=tiny().config, backbone=tiny().ref()) for path in out.iterdir()}
    assert made["reviews"].labels == ("bad", "good") and made["prices"].head.problem == "regression"
    shown = run(
        "train", other, "-o", tmp_path / "one", *columns, *options, "frozen"
    ).stdout  # as a pattern that one file matches
    assert "prices.safetensors" in shown and "pearson" in shown
    (tmp_path / "taken" / "prices.safetensors").mkdir(parents=True)
    for more, message, code in (
        (("-o", out, "--sweep", "1e-4..1e-3"), "--sweep: only for one file of texts", 2),
        (("-o", out, "--from", "x"), "--from: only for one file of texts", 2),
        (("-o", out, reviews), "each file makes a task of its own name, found 'reviews'", 2),
        (("-o", reviews), "must be a folder for several files", 2),
        (("-o", tmp_path / "x.safetensors"), "must be a folder for several files", 2),
        (("-o", tmp_path / "no" / "tasks"), "there is no folder 'no'", 2),
        (("-o", tmp_path / "taken"), "'prices.safetensors' is a folder", 2),
        (("--task", "x"), "a job makes one task", 2),
        (("-o", tmp_path / "new", "--label", "stars"), "expected a column 'stars'", 1),
        (("-o", tmp_path / "new", "--method", "mask"), "found mask", 1),
    ):
        refused = run("train", reviews, other, *columns, *more)
        assert refused.exit_code == code and message in " ".join(refused.stderr.replace("│", "").split()), (
            refused.stderr
        )
    assert not (tmp_path / "new").exists()


def test_a_task_that_diverges_does_not_cost_the_others(
    run: Run, tmp_path: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*given: Any, **how: Any) -> dict[str, Result]:
        found.update(found or train_many(*given, **how))  # the same each time
        return found | {id: dataclasses.replace(found[id], held_out=math.inf) for id in lost}

    def full(task: Task, path: Path) -> None:
        if path.stem == "other":
            raise OutOfSpace("the disk is full")
        write_task(task, path)

    lost = ["other"]
    found: dict[str, Result] = {}
    train_many = many.train_many
    monkeypatch.setattr(many, "train_many", diverge)
    other, out = tmp_path / "other.csv", tmp_path / "tasks"
    shutil.copy(reviews, other)
    columns = ("--text", "review", "--label", "verdict", "--backbone", BACKBONE, "--dtype", "float32")
    options = ("--method", "frozen", "--epochs", 1, "--batch", 8, "--max-length", 16)
    result = run("train", reviews, other, "-o", out, *columns, *options)
    assert result.exit_code == 1 and "other: the held-out loss is not finite" in result.stderr
    assert "reviews.safetensors" in result.stdout and [path.name for path in out.iterdir()] == ["reviews.safetensors"]
    write_task = task_file.write_task
    with monkeypatch.context() as broken:
        lost.clear()
        broken.setattr(task_file, "write_task", full)
        result = run("train", reviews, other, "-o", out, *columns, *options)
    assert result.exit_code == 1 and "other: the disk is full; the other tasks are written" in result.stderr
    lost.extend(["reviews", "other"])
    result = run("train", reviews, other, "-o", tmp_path / "none", *columns, *options)
    assert (
        "reviews: the held-out loss" in result.stderr
        and "other: the held" in result.stderr
        and not (tmp_path / "none").exists()
    )
