"""Groups of students on an engine: answers by every size, beside other tasks, and what may go wrong with a student."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from groups import (
    FIXED,
    TEXTS,
    Clock,
    answer,
    ask,
    asked,
    assert_answers,
    group_task,
    logits_by_size,
    sized,
)
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, light_or_mask_task, logits_of, paused, shallow, wait_until

from jpets.config import SizingRule
from jpets.engine.batch.bucket import Variant, lone_buckets
from jpets.engine.engine import Engine
from jpets.engine.programs.program import ProgramKey, compile_program
from jpets.engine.students.serving import StudentServing
from jpets.errors import InvalidTask, NotFound, Saturated, UnknownClass
from jpets.scheduling.costs.measured_profile import MOST_BESIDE
from jpets.types import Embedding, Failure, Query, Task, TaskName


def test_every_student_of_a_group_is_added(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    task = group_task()
    engine.add_task(task)
    assert_answers(asked(engine, "group"), task, 3)
    assert engine.uses() == {TaskName.of("group"): len(TEXTS)}
    told = engine.report().students
    assert told is not None and (told.groups, told.largest, told.answering) == (1, 3, 3)
    assert told.answers == {3: len(TEXTS)}


def test_one_text_finds_programs_for_every_size(tmp_path: Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=24, max_batch_tokens=64)
    with StudentServing.of_tasks(shallow(), [group_task("group", 3)], settings, cache_dir=tmp_path).start() as serving:
        engine = serving.engine
        assert isinstance(engine, Engine)
        shapes = set(lone_buckets(3, 24))
        assert {bucket.groups for bucket in shapes} == {((n, length),) for n in (1, 2, 3) for length in (16, 24)}
        wait_until(lambda: shapes <= {program.key.bucket for program in engine.replica.programs})
        before = engine.stats.fallbacks
        serving.infer([Query("group", "a text")])
        assert engine.stats.fallbacks == before


def test_students_of_a_hot_group_run_on_merged_copies() -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, merged_memory_gb=0.1)
    shapes = group_task().parts
    with Engine(shallow(), (), settings, reserve=shapes, buckets=ENGINE_BUCKETS).start() as inner:
        for program in inner.replica.programs:
            program.seconds = 10.0
        bare = compile_program(inner.family, ProgramKey(ENGINE_BUCKETS[1], Variant()))
        bare.seconds = 0.01
        inner._programs.add(bare)
        engine, task = StudentServing(inner, FIXED), group_task()
        engine.add_task(task)
        assert_answers(asked(engine, "group"), task, 3)
        wait_until(lambda: bool(asked(engine, "group")) and len(inner.merged.copies) == 3)
        found = asked(engine, "group")
        assert_answers(found, task, 3)
        assert {own.timing.program for own in found if own.timing is not None} == {bare.label}
        engine.remove_task("group")
        engine.infer([Query(None, TEXTS[0])])
        wait_until(lambda: not inner.merged.copies)


def test_groups_of_several_sizes_and_other_tasks_share_a_submission(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    small, large, plain = group_task("small", 1, seed=10), group_task("large", 3, seed=20), light_or_mask_task(0, "own")
    for task in (small, large, plain):
        engine.add_task(task)
    names = ["large", "own", "small", None, "large", "nobody"]
    found = engine.infer([Query(name, TEXTS[0]) for name in names])
    np.testing.assert_array_equal(logits_of(found[0]), logits_of(found[4]))
    np.testing.assert_allclose(logits_of(found[0]), logits_by_size(large, TEXTS[:1])[-1][0], atol=2e-4)
    np.testing.assert_allclose(logits_of(found[2]), logits_by_size(small, TEXTS[:1])[-1][0], atol=2e-4)
    assert [own.students for own in found] == [3, None, 1, None, 3, None]
    assert isinstance(found[3], Embedding) and isinstance(found[5].error, NotFound)
    engine.remove_task("own")


def test_a_new_version_replaces_all_students_at_once(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    first, second = group_task(seed=0), group_task(students=2, seed=30)
    engine.add_task(first, version=1)
    inner = engine.engine
    assert isinstance(inner, Engine)
    engine.add_task(second, version=2)
    assert_answers(asked(engine, "group"), second, 2)
    entry = engine.entry("group")
    assert entry is not None and entry.version == 2
    assert sum(1 for own in inner.tasks.all() if own.task.id.startswith("group#")) == 2
    plain = light_or_mask_task(0, "group")
    engine.add_task(plain, version=3)
    assert asked(engine, "group")[0].students is None
    engine.add_task(first, version=4)
    assert_answers(asked(engine, "group"), first, 3)
    engine.remove_task("group")
    with pytest.raises(NotFound):
        engine.remove_task("group")
    assert isinstance(asked(engine, "group")[0].error, NotFound)
    assert not any(own.task.id.startswith("group") for own in inner.tasks.all())


def test_a_group_that_finds_no_room_changes_nothing(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    first = group_task()
    engine.add_task(first)
    wide = group_task(students=2, seed=40)
    deltas = (wide.deltas[0], dataclasses.replace(light_or_mask_task(2).deltas[0]))  # its class has no bank
    with pytest.raises(UnknownClass):
        engine.add_task(dataclasses.replace(wide, deltas=deltas))
    assert_answers(asked(engine, "group"), first, 3)
    inner = engine.engine
    assert isinstance(inner, Engine)
    assert sum(1 for own in inner.tasks.all() if own.task.id.startswith("group#")) == 3


def test_registered_groups_are_read_when_they_are_asked(serving: Callable[..., StudentServing]) -> None:
    engine, task, reads = serving(), group_task(), []

    def load() -> Task:
        reads.append(1)
        return task

    classes = engine.lower_task(task).classes
    engine.register_task("group", load, version=7, classes=classes, students=3)
    assert engine.tier("group") == "repository" and not reads
    assert_answers(asked(engine, "group"), task, 3)
    assert engine.tier("group") == "device" and len(reads) == 1
    engine.unload("group")
    assert engine.tier("group") != "device"
    assert_answers(asked(engine, "group"), task, 3)
    with pytest.raises(InvalidTask, match="StudentServing"):
        engine.engine.register_task("group", load, students=3)
    with pytest.raises(InvalidTask, match="group of students"):
        engine.engine.add_task(task)


def test_a_student_that_is_missing_leaves_a_smaller_group(serving: Callable[..., StudentServing]) -> None:
    engine, task = serving(), group_task()
    engine.add_task(task)
    group = engine._group("group", "default")
    assert group is not None
    engine.engine.remove_task(group.ids[1])
    assert_answers(asked(engine, "group"), task, 1)
    engine.engine.remove_task(group.ids[0])
    found = asked(engine, "group")
    assert all(isinstance(own, Failure) and isinstance(own.error, NotFound) for own in found)
    assert all(own.task == "group" for own in found)


def test_a_file_with_other_students_than_were_announced_is_an_error(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    engine.register_task("group", lambda: group_task(students=2), students=3)
    found = asked(engine, "group")
    assert all(isinstance(own.error, InvalidTask) and "3 students" in own.error.message for own in found)

    def gone() -> Task:
        raise NotFound("the file is gone")

    engine.register_task("group", gone, students=3)
    assert all(isinstance(own.error, NotFound) for own in asked(engine, "group"))


def test_a_version_that_is_replaced_answers_the_queries_that_it_got(
    serving: Callable[..., StudentServing],
) -> None:
    """Also those that still wait for it to be read."""
    engine, first, second = serving(), group_task(), group_task(students=2, seed=30)
    reading, go_on = threading.Event(), threading.Event()

    def slow() -> Task:
        reading.set()
        assert go_on.wait(60)
        return first

    engine.register_task("group", slow, version=1, students=3)
    early = engine.submit([Query("group", text) for text in TEXTS])
    assert reading.wait(60)
    engine.add_task(second, version=2)
    assert_answers(asked(engine, "group"), second, 2)
    go_on.set()
    assert_answers([future.result() for future in early], first, 3)
    inner = engine.engine
    assert isinstance(inner, Engine)
    wait_until(lambda: inner.tasks.entry("default", "group#0.1") is None)


def test_students_are_no_tasks_of_a_user(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    engine.add_task(group_task())
    group = engine._group("group", "default")
    assert group is not None and engine.entry(group.ids[0]) is None
    (found,) = engine.infer([Query(group.ids[0], TEXTS[0])])
    assert isinstance(found.error, NotFound)
    engine.engine.remove_task(group.ids[0])
    (found,) = engine.infer([Query("group", TEXTS[0])])
    assert isinstance(found.error, NotFound) and "#" not in found.error.message


def test_a_group_computes_as_many_texts_as_the_device_is_profiled_for(
    serving: Callable[..., StudentServing], own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for the largest group and for texts as long as those of late, and again after a while."""
    asked_for: list[tuple[int, int]] = []

    def beside(rows: int, length: int) -> int:
        asked_for.append((rows, length))
        return 5

    clock, tokens = Clock(), []
    monkeypatch.setattr(own_engine, "beside", beside)
    engine = serving(SizingRule(groups=1), clock)
    engine.add_task(group_task())
    assert engine.size.together == 1
    for _ in range(3):
        tokens += [result.tokens for result in engine.infer([Query("group", TEXTS[0])])]
    told = engine.report().students
    assert asked_for == [(3, 32)] and told is not None and told.together == 5
    clock.now += 11
    engine.infer([Query("group", TEXTS[0])])
    (_, (rows, length)) = asked_for
    assert rows == 3 and tokens[0] <= length < 32
    ask(engine.size, 5)
    assert engine.size.of(3) == 3, "one group takes them"
    engine.size.asked()
    assert engine.size.of(3) == 2
    answer(engine.size, 6)
    own = sized(Clock(), together=2)
    own.profiled(7)
    assert own.together == 2, "a number that was asked for stays"


def test_what_runs_side_by_side_takes_at_most_twice_as_long(own_engine: Engine) -> None:
    profile = own_engine.profile.current
    for rows, length in ((1, 8), (3, 16)):
        count = own_engine.beside(rows, length)
        one, some, more = profile.alpha.at(np.array([1, count, count + 1]) * rows, [length])[:, 0]
        assert some <= 2 * one and (more > 2 * one or count == MOST_BESIDE)


def test_under_load_fewer_students_answer(serving: Callable[..., StudentServing], own_engine: Engine) -> None:
    clock = Clock()
    engine, task = serving(SizingRule(groups=1, together=1, window=60), clock), group_task()
    engine.add_task(task)
    assert_answers(
        asked(engine, "group", TEXTS[:1]) + asked(engine, "group", TEXTS[1:2]) + asked(engine, "group", TEXTS[2:]),
        task,
        3,
    )
    futures = [engine.submit([Query("group", TEXTS[0])])[0] for _ in range(12)]
    sizes = [own.result().students or 0 for own in futures]
    assert sizes[0] == 3 and sizes[-1] == 1
    assert sorted(sizes, reverse=True) == sizes, "never more again while it is busy"
    wait_until(lambda: engine.size._outstanding == 0)
    clock.now = 200
    assert_answers(
        asked(engine, "group", TEXTS[:1]) + asked(engine, "group", TEXTS[1:2]) + asked(engine, "group", TEXTS[2:]),
        task,
        3,
    )
    told = engine.report().students
    assert told is not None and told.drops == 2 and told.additions == 2


def test_all_texts_of_a_submission_are_answered_by_as_many_students(
    serving: Callable[..., StudentServing], own_engine: Engine
) -> None:
    engine = serving(SizingRule(groups=1, together=1))
    engine.add_task(group_task())
    queries = [Query("group", text) for text in (*TEXTS, *TEXTS)]
    with paused(own_engine):
        idle, behind = engine.submit(queries), engine.submit(queries)
    assert {future.result(30).students for future in idle} == {3}, "nobody waits behind it"
    assert {future.result(30).students for future in behind} == {2}


def test_an_answer_names_the_version_that_made_it(serving: Callable[..., StudentServing]) -> None:
    engine = serving()
    engine.add_task(group_task(), version=7)
    assert {own.version for own in asked(engine, "group")} == {7}


def test_a_request_that_is_refused_is_no_load(
    serving: Callable[..., StudentServing], own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving(SizingRule(groups=1, together=1))
    engine.add_task(group_task())
    with monkeypatch.context() as full:
        full.setattr(own_engine, "submit", mock.Mock(side_effect=Saturated("the queue is full")))
        for _ in range(3):
            with pytest.raises(Saturated):
                engine.submit([Query("group", text) for text in TEXTS])
    assert engine.size._outstanding == 0 and engine.size.drops == 0
    assert asked(engine, "group")[0].students == 3


def test_the_last_answer_of_a_version_that_left_waits_for_nothing(
    serving: Callable[..., StudentServing], own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal may wait for the thread that gives the answer."""
    engine, removed, may = serving(), threading.Event(), threading.Event()
    engine.add_task(group_task())
    remove_task = own_engine.remove_task

    def slow(task: str, *, tenant: str = "default") -> None:
        assert may.wait(20)
        remove_task(task, tenant=tenant)
        removed.set()

    held = engine._hold("group", "default")
    assert held is not None
    engine.remove_task("group")
    monkeypatch.setattr(own_engine, "remove_task", slow)
    engine._let_go(held)
    assert not removed.is_set()
    may.set()
    wait_until(lambda: not any(own.task.id.startswith("group#") for own in own_engine.tasks.all()))


def test_an_engine_for_tasks_takes_groups_among_them() -> None:
    task, plain = group_task(), light_or_mask_task(0, "own")
    with StudentServing.of_tasks(
        shallow(), [task, plain], ENGINE_SETTINGS, reserve=[group_task("other", seed=90)], buckets=ENGINE_BUCKETS,
        rule=FIXED,
    ) as engine:  # fmt: skip
        assert not engine.ready
        engine.start()
        assert engine.ready
        assert_answers(asked(engine, "group"), task, 3)
        assert asked(engine, "own")[0].error is None
