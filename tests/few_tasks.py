"""A service of tiny-bert that holds a few tasks, in programs of one small shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from support import tiny

from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.config import EngineSettings
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Task
from serving.hosted.repository import Validator
from serving.hosted.service import Service

LONGEST = 32
SETTINGS = EngineSettings(
    dtype="float32", max_length=LONGEST, max_batch_tokens=64, max_batch_rows=4, slots=2, background_compile=False
)


@contextlib.contextmanager
def serving_few(folder: Path, tasks: Sequence[Task], validator: Validator) -> Iterator[Service]:
    repository = Repository(folder / "repository", validator=validator)
    for task in tasks:
        repository.put(task.id, task_to_bytes(task))
    service = Service(repository, tiny(), validator, growing=False)
    bucket = [Bucket(64, ((4, LONGEST),))]
    service.start(lambda coming: Engine(tiny(), (), SETTINGS, coming=coming, cache_dir=folder, buckets=bucket))
    yield service
    service.close()
    repository.close()
