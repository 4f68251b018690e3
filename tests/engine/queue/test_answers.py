"""Every query ends once, whatever happens to its batch and its client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.rows import Row
from jpets.engine.engine import Engine
from jpets.engine.queue.answers import Answers
from jpets.engine.queue.pending import Pending
from jpets.engine.results.results import failure
from jpets.engine.results.stats import Stats
from jpets.engine.tasks.table import TaskTable
from jpets.errors import EngineFailure, Saturated
from jpets.types import Embedding, Query

ERROR = EngineFailure("the device failed")


class Counted(TaskTable):
    """Counts how often a query released its task."""

    def __init__(self) -> None:
        super().__init__({})
        self.let_go = 0

    def done(self, resident: Any, queries: int = 1) -> None:
        del resident, queries
        self.let_go += 1


def query() -> Pending:
    ids, slots = np.full(3, 7, np.int32), dict[ClassKey, int]()
    resident: Any = object()
    return Pending("task", resident, Row.of_tokens(ids, ids, slots, 0), None, 0, "tenant")


@pytest.fixture
def tasks() -> Counted:
    return Counted()


@pytest.fixture
def stats() -> Stats:
    return Stats()


@pytest.fixture
def answers(tasks: Counted, stats: Stats) -> Answers:
    return Answers(tasks, stats)


def counts(stats: Stats) -> Mapping[str, int]:
    return dict(stats.answers)


def test_a_batch_that_fails_half_way(answers: Answers, tasks: Counted, stats: Stats) -> None:
    answered, gone, waiting = batch = [query() for _ in range(3)]
    gone.future.cancel()
    result = Embedding(task="task", tokens=3, embedding=np.ones(2, np.float32))
    answers.give(answered, result)
    answers.give(gone, result)
    answers.fail(batch, ERROR)
    answers.fail(batch, ERROR)
    assert answered.future.result() is result
    assert waiting.future.result() == failure("task", ERROR, 3)
    assert tasks.let_go == 3
    assert counts(stats) == {"ok": 1, "cancelled": 1, ERROR.code: 1}


def test_a_client_that_leaves_while_it_waits(answers: Answers, tasks: Counted, stats: Stats) -> None:
    pending = query()
    pending.future.cancel()
    answers.left(pending)
    answers.fail([pending], Saturated("full"))
    assert tasks.let_go == 1
    assert counts(stats) == {"cancelled": 1}


def test_a_submission_looks_a_task_up_once_and_holds_it_for_each_query(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = mock.Mock(wraps=engine.tasks.acquire)
    monkeypatch.setattr(engine.tasks, "acquire", acquire)
    hits = engine.tasks.hits
    names: list[Any] = ["mask", "bitfit", "mask", None, "mask", ["no", "id"]]
    results = engine.infer([Query(name, "a text") for name in names])
    assert [result.error is None for result in results] == [True] * 5 + [False]
    assert [call.args[1:] for call in acquire.mock_calls] == [("mask", 3), ("bitfit", 1)]
    assert engine.tasks.hits == hits + 4
    assert all(resident.queries == 0 for resident in engine.tasks.all())
