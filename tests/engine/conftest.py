"""One tiny engine for the tests of submit and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, method_tasks, shallow

from jpets.engine.engine import Engine


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
