from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_jobs import Published, command_of

from serving.jobs.folder import JobFolders
from serving.jobs.runner import JobRunner


@pytest.fixture
def jobs(tmp_path: Path) -> JobFolders:
    return JobFolders(tmp_path / "jobs")


@pytest.fixture
def published() -> Published:
    return Published()


@pytest.fixture
def make_runner(jobs: JobFolders, published: Published) -> Iterator[Callable[[], JobRunner]]:
    """Runners that have started; they are closed at the end."""
    made: list[JobRunner] = []

    def make() -> JobRunner:
        runner = JobRunner(jobs, command_of, published, attempts=3, back_off=0.01)
        made.append(runner)
        runner.start()
        return runner

    yield make
    for runner in made:
        runner.close()
