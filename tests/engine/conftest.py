"""One tiny engine for the tests of submit and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import method_tasks, tiny

from jpets.config import EngineSettings
from jpets.engine.bucket import Bucket
from jpets.engine.engine import Engine

BUCKETS = [Bucket(32, ((1, 32),)), Bucket(256, ((14, 16), (4, 64)))]
SETTINGS = EngineSettings(dtype="float32", max_length=64, max_batch_rows=16, slots=10, background_compile=False)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        tiny(), method_tasks(tiny()), SETTINGS, cache_dir=tmp_path_factory.mktemp("cache"), buckets=BUCKETS
    ) as own:
        yield own.start()
