"""One tiny engine for the tests of submit and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, method_tasks, tiny

from jpets.engine.engine import Engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        tiny(),
        method_tasks(tiny()),
        ENGINE_SETTINGS,
        cache_dir=tmp_path_factory.mktemp("cache"),
        buckets=ENGINE_BUCKETS,
    ) as own:
        yield own.start()
