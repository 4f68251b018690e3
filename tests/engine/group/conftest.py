"""Groups of engines, made for the tests of one file."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from grouped import BUCKETS, DEVICES, SETTINGS, TASKS, Make
from support import shallow, wait_until

from jpets.engine.group.group import EngineGroup


@pytest.fixture(scope="session")
def group_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Programs are compiled once."""
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def make(group_cache: pathlib.Path) -> Iterator[Make]:
    """Groups that know all tasks; the first 12 are on devices."""
    made: list[EngineGroup] = []

    def group(devices: int = DEVICES, settings: Any = SETTINGS, **how: Any) -> EngineGroup:
        chosen = jax.local_devices()[:devices]
        own = EngineGroup(shallow(), chosen, settings, reserve=TASKS[:3], cache_dir=group_cache, buckets=BUCKETS, **how)
        made.append(own)
        for task in TASKS:
            own.register_task(task.id, functools.partial(lambda task: task, task))
        own.start()
        own.warm([task.id for task in TASKS[:12]])
        wait_until(lambda: not own.warming)
        return own

    yield group
    for own in made:
        own.close()


@pytest.fixture(scope="module")
def group(make: Make) -> EngineGroup:
    return make()
