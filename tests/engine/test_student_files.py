"""A group's file is read once for all its students, and what is read waits in memory no longer than they need it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from groups import TEXTS, Clock, answer, ask, asked, assert_answers, group_task
from support import wait_until

from jpets import readers
from jpets.config import SizingRule
from jpets.engine.engine import Engine
from jpets.engine.students.files import AT_ONCE, GroupFiles
from jpets.engine.students.group import Group
from jpets.engine.students.serving import StudentServing
from jpets.errors import NotFound
from jpets.types import Failure, Query, Task

Make = Callable[..., StudentServing]
LOADED = SizingRule(groups=1, together=1, window=60)


class File:
    """A group's file that counts how often it is read. ``tasks`` are what it holds at each reading, the last one from
    then on; an error is raised."""

    def __init__(self, *tasks: Task | Exception) -> None:
        self.reads = 0
        self._tasks = tasks

    def __call__(self) -> Task:
        found = self._tasks[min(self.reads, len(self._tasks) - 1)]
        self.reads += 1
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def no_host_memory(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves the device is read again."""
    monkeypatch.setattr(own_engine.residency.host, "budget", 0.0)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each student that is asked for, before it waits for a reading."""
    noted, load = list[int](), GroupFiles.load

    def note(files: GroupFiles, group: Group, at: int) -> Task:
        noted.append(at)
        return load(files, group, at)

    monkeypatch.setattr(GroupFiles, "load", note)
    return noted


@pytest.fixture
def few(serving: Make) -> Iterator[StudentServing]:
    """One that answers by the first student alone until its clock is at 1000."""
    clock = Clock()
    own = serving(LOADED, clock)
    own.size.resize(3)
    ask(own.size, 40)
    answer(own.size, 40)
    assert own.size.of(3) == 1
    yield own


def registered(
    serving: StudentServing, file: Callable[[], Task], name: str = "group", students: int = 3
) -> StudentServing:
    classes = serving.lower_task(group_task(students=students)).classes
    serving.register_task(name, file, version=7, classes=classes, students=students)
    return serving


def group_of(serving: StudentServing, name: str = "group") -> Group:
    found = serving._group(name, "default")
    assert found is not None
    return found


def left(serving: StudentServing) -> int:
    """Students that were read and wait for somebody to take them."""
    return sum(map(len, serving._files._left.values()))


def all_students(serving: StudentServing) -> None:
    """The quiet windows are over in which fewer answered."""
    clock = serving.size._clock
    assert isinstance(clock, Clock)
    clock.now = 1000.0


def test_a_group_is_read_once_each_time_that_it_comes(serving: Make) -> None:
    task = group_task()
    file = File(task)
    engine = registered(serving(), file)
    for times in (1, 2):
        assert_answers(asked(engine, "group"), task, 3)
        assert (file.reads, left(engine)) == (times, 0)
        engine.unload("group")
    engine.warm(["group"])
    wait_until(lambda: engine.tier("group") == "device")
    assert (file.reads, left(engine)) == (3, 0)


def test_readers_side_by_side_read_it_once(serving: Make, loads: list[int]) -> None:
    go_on, task = threading.Event(), group_task()
    file = File(task)

    def slow() -> Task:
        assert go_on.wait(60)
        return file()

    engine = serving()
    engine.register_task("group", slow, classes=engine.lower_task(task).classes, students=3)
    busy = engine._hold("group", "default")  # as if one more query waited for them
    early = engine.submit([Query("group", text) for text in TEXTS])
    wait_until(lambda: len(loads) == 3)
    go_on.set()
    assert_answers([future.result(60) for future in early], task, 3)
    assert (file.reads, left(engine)) == (1, 0)
    engine._let_go(busy)


def test_students_that_do_not_answer_wait_in_no_memory(few: StudentServing) -> None:
    task = group_task()
    file = File(task)
    engine = registered(few, file)
    assert_answers(asked(engine, "group", TEXTS[:1]), task, 1)
    assert (file.reads, left(engine)) == (1, 0)
    all_students(engine)
    assert_answers(asked(engine, "group", TEXTS[:1]), task, 3)
    assert (file.reads, left(engine)) == (2, 0), "the second and the third together"


def test_students_of_queries_that_left_wait_in_no_memory(serving: Make, own_engine: Engine) -> None:
    """The query is cancelled while the first student is read."""
    reading, go_on, task = threading.Event(), threading.Event(), group_task()

    def slow() -> Task:
        reading.set()
        assert go_on.wait(60)
        return task

    engine = serving()
    engine.register_task("group", slow, classes=engine.lower_task(task).classes, students=3)
    (future,) = engine.submit([Query("group", TEXTS[0])])
    assert reading.wait(60)
    assert future.cancel()
    go_on.set()
    wait_until(lambda: not own_engine.residency.coming)
    assert left(engine) == 0


def test_a_damaged_student_leaves_a_smaller_group(serving: Make) -> None:
    task, engine = group_task(), serving()
    cut = dataclasses.replace(task.deltas[1], tensors=dict(list(task.deltas[1].tensors.items())[1:]))
    for deltas, size in (((*task.deltas[:2], cut), 2), ((task.deltas[0], cut, task.deltas[2]), 1)):
        file = File(dataclasses.replace(task, deltas=deltas))
        registered(engine, file)
        assert_answers(asked(engine, "group"), task, size)
        assert (file.reads, left(engine)) == (1, 0)
    registered(engine, File(dataclasses.replace(task, deltas=(cut, *task.deltas[1:]))))
    assert all(isinstance(own, Failure) and own.task == "group" for own in asked(engine, "group"))
    wait_until(lambda: left(engine) == 0)


def test_one_failed_reading_is_told_to_all_students(serving: Make) -> None:
    """The next query tries again."""
    task = group_task()
    file = File(NotFound("the disk is away"), task)
    engine = registered(serving(), file)
    assert all(isinstance(own.error, NotFound) for own in asked(engine, "group"))
    wait_until(lambda: left(engine) == 0)
    assert file.reads == 1
    assert_answers(asked(engine, "group"), task, 3)
    assert (file.reads, left(engine)) == (2, 0)


def test_a_failed_reading_is_told_to_students_whose_query_has_left(
    serving: Make, own_engine: Engine, loads: list[int]
) -> None:
    """None of them makes an attempt of its own behind the one that it has waited for."""
    go_on, file = threading.Event(), File(NotFound("the disk is away"))

    def slow() -> Task:
        assert go_on.wait(60)
        return file()

    engine = registered(serving(), slow)
    (future,) = engine.submit([Query("group", TEXTS[0])])
    wait_until(lambda: len(loads) == 3)
    assert future.cancel()
    go_on.set()
    wait_until(lambda: not own_engine.residency.coming)
    assert (file.reads, left(engine)) == (1, 0)


def test_a_failure_is_not_told_to_those_who_ask_after_it(serving: Make) -> None:
    """Though no student has come to hear of it meanwhile."""
    file = File(NotFound("the disk is away"), group_task())
    engine = registered(serving(), file)
    files, group = engine._files, group_of(engine)
    files.want(group, 3)
    with pytest.raises(NotFound):
        files.loader(group, 0)()
    files.want(group, 3)
    assert files.loader(group, 1)().id == group.ids[1]


def test_students_of_two_files_are_not_added_up(few: StudentServing) -> None:
    first, other = group_task(), group_task(seed=70)
    engine = registered(few, File(first, other))
    assert_answers(asked(engine, "group", TEXTS[:1]), first, 1)
    all_students(engine)
    assert_answers(asked(engine, "group", TEXTS[:1]), first, 1)
    engine.unload("group")
    (found,) = asked(engine, "group", TEXTS[:1])
    assert found.error is not None and "has changed" in found.error.message


def test_only_so_many_groups_wait_in_memory(serving: Make) -> None:
    """Of many groups whose first students come, and for whose others there are no slots."""
    engine = serving()
    names = [f"group-{number}" for number in range(AT_ONCE + 4)]
    for name in names:
        registered(engine, File(group_task()), name)
    groups = [group_of(engine, name) for name in names]
    for group in groups:
        engine._files.want(group, 3)
        assert engine._files.loader(group, 0)().id == group.ids[0]
    assert left(engine) == 2 * AT_ONCE
    assert list(engine._files._left) == groups[4:]
    for name in names:
        engine.remove_task(name)
    assert left(engine) == 0


def test_warming_keeps_no_part_of_a_group_that_finds_no_room(serving: Make, own_engine: Engine) -> None:
    """The last group for which there are slots finds them for some of its students."""
    engine, names = serving(), [f"group-{number}" for number in range(9)]
    registered(engine, File(group_task(students=1)), "alone", 1)
    for name in names:
        registered(engine, File(group_task()), name)
    engine.warm(["alone", *names])
    wait_until(lambda: not engine.warming)
    ids = [group_of(engine, name).ids for name in names]
    here = [sum(own_engine.tier(id) == "device" for id in own) for own in ids]
    assert here[0] == 3 and here[-1] == 0 and not {1, 2}.isdisjoint(here)
    assert left(engine) == 0


def test_students_to_warm_wait_for_no_query(serving: Make) -> None:
    """The last answer of other students drops nothing that they need."""
    file = File(group_task())
    engine = registered(serving(), file)
    files, group = engine._files, group_of(engine)
    files.want(group, 1)
    files.warm(group)
    for at in range(3):
        assert files.loader(group, at)().id == group.ids[at]
        files.forget(group)
    assert (file.reads, left(engine)) == (1, 0)


def test_all_students_of_a_slow_file_stay_longer_than_quick_tasks(
    serving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were taken from what another one's reading had left, as all are here but one."""
    monkeypatch.setattr(readers, "QUICK", 60.0)
    task, others = group_task(), [f"other-{number}" for number in range(24)]
    file = File(task)

    def slow() -> Task:
        time.sleep(1)
        return file()

    engine = registered(serving(), slow)
    assert_answers(asked(engine, "group"), task, 3)
    for name in others:
        registered(engine, File(group_task(students=1)), name, 1)
        assert asked(engine, name, TEXTS[:1])[0].error is None
    assert "repository" in {engine.tier(name) for name in others}
    assert engine.tier("group") == "device"
