"""Engines with more tasks than slots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paged_engine import SETTINGS, TASKS, loader
from support import ENGINE_BUCKETS, shallow

from jpets.engine.device import classes
from jpets.engine.engine import Engine


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("paged")


@pytest.fixture
def paged(cache: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Engines that know all tasks and have room for a few, as many of each class; ``loads`` counts how often each was
    read."""
    made: list[Engine] = []
    monkeypatch.setattr(classes, "class_parts", lambda keys, *_: dict.fromkeys(keys, 1))

    def make(**changes: Any) -> Engine:
        settings = dataclasses.replace(SETTINGS, **changes)
        own = Engine(shallow(), [], settings, reserve=TASKS[:3], cache_dir=cache, buckets=ENGINE_BUCKETS).start()
        made.append(own)
        own.loads = Counter()  # type: ignore[attr-defined]
        for task in TASKS:
            own.register_task(task.id, loader(own, task))
        return own

    yield make
    for own in made:
        own.close()
