"""Tiny engines for the tests of submit and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from groups import FIXED, Clock, group_task
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, light_or_mask_task, method_tasks, shallow

from jpets.config import SizingRule
from jpets.engine.engine import Engine
from jpets.engine.students.serving import StudentServing


@pytest.fixture(scope="session")
def engine(program_cache: Path) -> Iterator[Engine]:
    with Engine(
        shallow(),
        method_tasks(shallow()),
        ENGINE_SETTINGS,
        cache_dir=program_cache,
        buckets=ENGINE_BUCKETS,
    ) as own:
        yield own.start()


@pytest.fixture(scope="module")
def own_engine(program_cache: Path) -> Iterator[Engine]:
    """With room for the students of ``groups.group_task``."""
    shapes = [*group_task().parts, light_or_mask_task(0)]
    with Engine(shallow(), (), ENGINE_SETTINGS, reserve=shapes, cache_dir=program_cache, buckets=ENGINE_BUCKETS) as own:
        yield own.start()


@pytest.fixture
def serving(own_engine: Engine) -> Iterator[Callable[..., StudentServing]]:
    """Makes servings of groups on that engine."""
    made: list[StudentServing] = []

    def make(rule: SizingRule = FIXED, clock: Callable[[], float] | None = None) -> StudentServing:
        made.append(StudentServing(own_engine, rule, clock=clock or Clock()))
        return made[-1]

    yield make
    for each in made:
        for name in list(each._groups):
            each.remove_task(name.id)
