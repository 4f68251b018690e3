"""Another kind of model through the same engine, server and HTTP: other inputs, other depth, a state, two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from looked_up import LookedUpWorkload, expected, two_tasks
from support import ENGINE_SETTINGS, shallow

from checkpoints.backbone import Backbone
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.workloads.registry import WORKLOADS
from jpets.errors import InvalidInput
from jpets.types import Classification, Query, Task

BUCKETS = [Bucket(32, ((4, 8), (2, 16)))]
TEXTS = ["a chess engine", "the library that it needs", "chess"]


@pytest.fixture
def backbone(monkeypatch: pytest.MonkeyPatch) -> Backbone:
    monkeypatch.setitem(WORKLOADS, "looked-up", LookedUpWorkload)
    return dataclasses.replace(shallow(), kind="looked-up")


@pytest.fixture
def tasks() -> list[Task]:
    return two_tasks()


@pytest.fixture
def engine(backbone: Backbone, tasks: list[Task], program_cache: Path) -> Iterator[Engine]:
    with Engine(backbone, tasks, ENGINE_SETTINGS, cache_dir=program_cache, buckets=BUCKETS) as own:
        yield own.start()


def test_queries_of_several_tasks_take_two_steps(engine: Engine, tasks: list[Task]) -> None:
    asked = [(task, text) for task in tasks for text in TEXTS]
    results = engine.infer([Query(task.id, text) for task, text in asked])
    for (task, text), result in zip(asked, results, strict=True):
        assert isinstance(result, Classification), result
        ids = engine.text.encode(Query(task.id, text), task.preprocessing).ids
        np.testing.assert_allclose(result.logits, expected(task, ids), atol=1e-4)
        assert result.tokens == len(ids)
    assert isinstance(engine.workload, LookedUpWorkload)
    assert len(engine.workload.steps) == 2 * len(asked)


def test_the_state_of_one_batch_is_there_in_the_next(engine: Engine) -> None:
    assert isinstance(engine.workload, LookedUpWorkload)
    for text in TEXTS:
        engine.infer([Query("lora", text)])
    assert engine.workload.steps == list(range(2 * len(TEXTS)))


def test_stored_programs_are_loaded_again(engine: Engine, tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.infer([Query("mask", TEXTS[0])])
    engine.close()
    monkeypatch.setattr("jpets.engine.compilation.readiness.compile_program", None)
    with Engine(engine.backbone, tasks, ENGINE_SETTINGS, cache_dir=engine.cache_dir, buckets=BUCKETS).start() as own:
        (found,) = own.infer([Query("mask", TEXTS[0])])
        assert isinstance(found, Classification) and isinstance(before[0], Classification)
        np.testing.assert_array_equal(found.logits, before[0].logits)


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="unknown kind of model 'decoder'; there are \\['encoder'"):
        Engine(dataclasses.replace(shallow(), kind="decoder"), (), ENGINE_SETTINGS, cache_dir=tmp_path)
