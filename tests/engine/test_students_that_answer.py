"""How many students of a group answer: as many as the queue has room for, and never fewer than learnt to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from groups import TEXTS, answer, ask, asked, assert_answers, group_task

from jpets.config import SizingRule
from jpets.engine.engine import Engine
from jpets.engine.students.serving import StudentServing
from jpets.errors import NotFound, Saturated, TooLarge
from jpets.types import Query, TaskName


@pytest.fixture
def limit(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Queries that the engine's queue takes: a few, which are soon answered."""
    monkeypatch.setattr(own_engine.pending, "_limit", 24)
    return 24


def test_a_full_queue_takes_the_first_students(serving: Callable[..., StudentServing], limit: int) -> None:
    task = group_task()
    refused = serving()
    refused.add_task(task)
    queries = [Query("group", "a")] * (limit // 2)
    with pytest.raises(TooLarge):
        refused.submit(queries)
    assert refused.size._outstanding == 0
    smaller = serving(SizingRule(groups=limit))
    smaller.add_task(task)
    assert {own.students for own in smaller.infer(queries)} == {2}
    assert {own.students for own in smaller.infer([*queries, *queries])} == {1}


def test_least_of_a_group_whose_file_was_not_read(serving: Callable[..., StudentServing]) -> None:
    """Nobody knew that one student is too few: that query is told to come again, and the next one gets all."""
    task = group_task()
    assert task.students is not None
    task = dataclasses.replace(task, students=dataclasses.replace(task.students, least=3))
    engine = serving(SizingRule(groups=1, together=1))
    engine.register_task(task.id, lambda: task, classes=engine.lower_task(task).classes, students=3)
    ask(engine.size, 20)
    assert engine.size.answering == 1
    (early,) = engine.infer([Query("group", TEXTS[0])])
    assert isinstance(early.error, Saturated) and "3 students or more" in early.error.message
    assert_answers(asked(engine, "group"), task, 3)
    told = engine.report().students
    assert told is not None and set(told.kept) == {3}, "what fewer of them would keep is nobody's business"


def test_groups_are_cut_as_far_as_each_may_be(serving: Callable[..., StudentServing], limit: int) -> None:
    """In one request that the queue has no room for: the largest one may not be cut at all."""
    task = group_task("whole", 4)
    assert task.students is not None
    engine = serving(SizingRule(groups=limit))
    engine.add_task(dataclasses.replace(task, students=dataclasses.replace(task.students, least=4)))
    engine.add_task(group_task("pruned", 3))
    found = engine.infer([Query(name, "a") for name in ("whole", "pruned")] * (limit // 6))
    assert [{own.students for own in found[at::2]} for at in (0, 1)] == [{4}, {2}]


@pytest.mark.parametrize("read", [True, False], ids=["added", "registered"])
def test_a_group_without_pruning_never_answers_by_fewer(
    serving: Callable[..., StudentServing], own_engine: Engine, limit: int, read: bool
) -> None:
    """Its head learnt from the sum of all alone."""
    task = group_task()
    assert task.students is not None
    task = dataclasses.replace(task, students=dataclasses.replace(task.students, least=3))
    engine = serving(SizingRule(groups=1, together=1))
    if read:
        engine.add_task(task)
    else:
        classes = engine.lower_task(task).classes
        engine.register_task(task.id, lambda: task, classes=classes, students=3, least=3)
    engine.add_task(group_task("other", seed=7))
    ask(engine.size, 20)
    assert engine.size.answering == 1
    assert_answers(asked(engine, "group"), task, 3)
    assert {own.students for own in asked(engine, "other")} == {1}
    mixed = [Query(name, "a") for name in ("group", "other")] * (limit // 4)
    answer(engine.size, 20)
    found = engine.infer(mixed)
    assert {own.students for own in found[::2]} == {3} and {own.students for own in found[1::2]} == {1}
    with pytest.raises(TooLarge):
        engine.submit([Query("group", "a")] * (limit // 2))
    own_engine.remove_task(engine._groups[TaskName.of("group")].ids[-1])
    (lost,) = engine.infer([Query("group", "a")])
    assert isinstance(lost.error, NotFound)
