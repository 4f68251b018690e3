from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from checkpoints.blobs import digest_of
from checkpoints.repository import Repository
from jpets.errors import Conflict, Saturated


def test_threads(repository: Repository, files: list[bytes]) -> None:
    def put(number: int) -> int:
        return repository.put(f"task-{number % 3}", files[number % 6]).version

    stop = threading.Event()
    removed: list[int] = []

    def collect() -> None:
        while not stop.is_set():
            removed.append(repository.collect())
            repository.list()

    collector = threading.Thread(target=collect)
    collector.start()
    with ThreadPoolExecutor(24) as pool:
        versions = list(pool.map(put, range(60)))
    stop.set()
    collector.join()
    assert sorted(versions) == sorted([*range(1, 21)] * 3)
    assert removed
    for id in ("task-0", "task-1", "task-2"):
        for stored in repository.versions(id):
            assert digest_of(repository.read(stored)) == stored.digest


def test_one_of_many_wins_a_race(repository: Repository, files: list[bytes]) -> None:
    repository.put("sample", files[0])

    def put(number: int) -> bool:
        try:
            repository.put("sample", files[number % 6], if_match=1)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(16))) == 1


def test_a_deletion_that_is_not_committed_keeps_its_file(repository: Repository, files: list[bytes]) -> None:
    """So files go by a transaction behind the one of their rows."""

    def fail(connection: sa.Connection) -> None:
        raise Saturated("the database is away")

    repository.put("sample", files[0])
    engine = repository._catalog._engine
    sa.event.listen(engine, "commit", fail)
    with pytest.raises(Saturated):
        repository.delete("sample")
    sa.event.remove(engine, "commit", fail)
    assert repository.read(repository.get("sample")) == files[0]
    repository.delete("sample")
    assert repository.list() == ([], None)


WRITER = """
import sys
from pathlib import Path
from checkpoints.repository import Repository
from checkpoints.task_file import read_task

folder, upload, name, count = sys.argv[1:]
data = Path(upload).read_bytes()
task = read_task(data, id=name)
repository = Repository(folder, validator=lambda data, id: task)
print("ready", flush=True)
number = 0
while number < int(count):
    number += 1
    # Trailing bytes make every blob a new one; the writer's validator does not look at them.
    repository.put(f"{name}-{number % 5}", data + str((name, number)).encode())
    if number % 7 == 0:
        repository.collect()
"""


def start_writer(folder: Path, upload: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(upload), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )


def check_whole(folder: Path) -> list[str]:
    """Every listed version's blob exists and is what its digest says; returns the digests of all versions."""
    repository = Repository(folder)
    found = [stored for task in repository.list()[0] for stored in repository.versions(task.id)]
    for stored in found:
        assert digest_of(repository.read(stored)) == stored.digest
    repository.close()
    return [stored.digest for stored in found]


def test_two_processes(tmp_path: Path, files: list[bytes]) -> None:
    upload = tmp_path / "upload.safetensors"
    upload.write_bytes(files[0])
    writers = [start_writer(tmp_path / "repository", upload, name, 40) for name in ("one", "two")]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert len(check_whole(tmp_path / "repository")) == 2 * 5 * 5


def test_killed_writers(tmp_path: Path, files: list[bytes]) -> None:
    upload, folder = tmp_path / "upload.safetensors", tmp_path / "repository"
    upload.write_bytes(files[0])
    rng, digests = random.Random(0), list[str]()
    for _ in range(3):
        writer = start_writer(folder, upload, "killed", 1_000_000)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 0.4))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        digests = check_whole(folder)
    assert digests
    repository = Repository(folder)
    repository.collect(stale_seconds=-1)
    repository.close()
    assert {path.name for path in (folder / "blobs").iterdir()} == {f"{digest}.safetensors" for digest in digests}
