"""A PET method in one file, ``vera``, and one row that names it: trained, saved, read, and served beside others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import ENGINE_SETTINGS, dense_answer, make_head, make_task, random_delta, shallow

from checkpoints.task_file import read_task, task_to_bytes
from jpets.app.standard import standard_methods
from jpets.deltas import METHODS, trainable
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.training.data import Example
from jpets.training.methods import check_continued, rates, together_names
from jpets.training.plan import Training, TrainingPlan
from jpets.training.session import run_training
from jpets.types import Classification, Query
from serving.jobs.request import FineTune

TEXTS = [Example("a library", None, "code"), Example("a game", None, "fun")] * 32
PLAN = TrainingPlan(epochs=3, batch=8, dtype="float32", head_rate=5e-2)
TRAINING = Training("vera", {"rank": 16}, PLAN, max_length=16)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "vera-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vera\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[jpets.methods]\nvera = vera:Vera\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = vars(METHODS)
    found.pop("_every", None)  # looked up anew
    yield
    found.pop("_every", None)


def test_it_is_known_wherever_methods_are_named() -> None:
    assert "vera" in trainable() and "vera" in together_names() and rates()["vera"] == 2e-2
    assert "vera" not in standard_methods() and METHODS["vera"].merges
    assert FineTune(task="own", method="vera").method == "vera"
    check_continued(["vera"], "vera", {})
    with pytest.raises(InvalidInput, match=r"vera takes the settings \['layers', 'rank', 'sites'\], found \['alpha'\]"):
        run_training("own", shallow(), dataclasses.replace(TRAINING, settings={"alpha": 2}), TEXTS)
    with pytest.raises(InvalidInput, match="vera: rank must be a whole number up to the hidden size"):
        run_training("own", shallow(), dataclasses.replace(TRAINING, settings={"rank": 0}), TEXTS)


def test_it_is_trained_saved_read_and_served_with_others_and_trained_on(tmp_path: Path) -> None:
    backbone = shallow()
    found = run_training("own", backbone, TRAINING, TEXTS)
    assert found.scores["accuracy"] == 1 and found.losses[-1] < found.losses[0] / 2
    (delta,) = found.task.deltas
    assert all(np.any(delta.tensors[f"{site}/b"]) for site in ("query", "value"))
    task = read_task(task_to_bytes(found.task), id="own", config=backbone.config, backbone=backbone.ref())
    rng = np.random.default_rng(0)
    others = [
        make_task(backbone, method, [random_delta(method, backbone.config, at)], make_head(rng, 64, 3))
        for at, method in enumerate(("lora", "bitfit"))
    ]
    tasks = {each.id: each for each in (task, *others)}
    text = TextEncoder.of(backbone)
    queries = [Query(name, f"a library of {name}s") for name in (*tasks, "own")]
    with Engine(
        backbone, [*tasks.values()], ENGINE_SETTINGS, cache_dir=tmp_path / "cache", buckets=[Bucket(64, ((4, 16),))]
    ).start() as engine:
        answers = engine.infer(queries)
    for query, answer in zip(queries, answers, strict=True):
        assert isinstance(answer, Classification) and query.task is not None
        tokens = text.encode(query, tasks[query.task].preprocessing)
        expected = dense_answer(backbone, tasks[query.task], np.asarray(tokens.ids))["logits"]
        np.testing.assert_allclose(answer.logits, np.squeeze(expected), atol=2e-4)
    assert [answer.label for answer in answers if isinstance(answer, Classification)][::3] == ["code", "code"]
    again = dataclasses.replace(TRAINING, settings={}, plan=dataclasses.replace(PLAN, epochs=1))
    second = run_training("own", backbone, again, TEXTS, start=task)
    assert second.losses[0] < found.losses[0] / 2
