"""Several small files to tasks, with nothing else said: they learn what words alone do not tell."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from runs import Run
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from support import FIXTURES, tiny

from checkpoints.task_file import read_task
from jpets.training.data import Example
from jpets.training.session import evaluate_task

PAIRS = {"order": ("library", "game"), "sides": ("module", "sound")}


def texts(words: tuple[str, str], count: int, seed: int) -> list[Example]:
    """The same words with either label: which of the two comes first decides."""
    rng = np.random.default_rng(seed)
    found = []
    for label in rng.choice(["ahead", "behind"], count):
        first, second = words if label == "ahead" else words[::-1]
        other = rng.choice(["file", "tool", "data", "text"])
        found.append(Example(f"{first} {other} {second}", None, str(label)))
    return found


def test_small_files_become_tasks_that_beat_their_words(run: Run, tmp_path: Path) -> None:
    files = []
    for name, words in PAIRS.items():
        files.append(tmp_path / f"{name}.csv")
        with files[-1].open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("text", "label"), *((each.text, each.label) for each in texts(words, 96, 0))])
    result = run("train", *files, "-o", tmp_path / "tasks", "--backbone", FIXTURES / "tiny-bert", "--json")
    assert result.exit_code == 0, result.output
    for summary, words in zip(json.loads(result.stdout)["tasks"], PAIRS.values(), strict=True):
        train, test = texts(words, 96, 0), texts(words, 96, 1)
        model = make_pipeline(TfidfVectorizer(), LogisticRegression())
        model.fit([each.plain for each in train], [each.label for each in train])
        usual = model.score([each.plain for each in test], [each.label for each in test])
        task = read_task(tmp_path / "tasks" / summary["file"], config=tiny().config, backbone=tiny().ref())
        assert evaluate_task(task, tiny(), test)["accuracy"] > usual + 0.1
        assert (summary["epochs"], summary["batch"]) == (17, 16) and summary["texts"] == {"trained": 86, "held_out": 10}
        assert summary["held_against"]["majority_accuracy"] < summary["scores"]["accuracy"]
        assert "frozen_accuracy" in summary["held_against"] and summary["rate"] == 4e-3
