from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from support import wait_until

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
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from checkpoints.repository import Repository
from checkpoints.task_file import read_task

folder, upload, name, count, threads = sys.argv[1:]
data = Path(upload).read_bytes()
task = read_task(data, id=name)
repository = Repository(folder, validator=lambda data, id: task)

def write(thread):
    for number in range(int(count)):
        id = f"{name}-{thread}-{number % 5}"
        # Trailing bytes make every blob a new one; the writer's validator does not look at them.
        stored = repository.put(id, data + str((name, thread, number)).encode())
        os.write(1, f"{id} {stored.version}\\n".encode())
        if number % 7 == 6:
            repository.collect()

print("ready", flush=True)
with ThreadPoolExecutor(int(threads)) as pool:
    list(pool.map(write, range(int(threads))))
"""
"""Writes a line for each version that it was told of."""


def start_writer(
    folder: Path, upload: Path, name: str, count: int, threads: int = 1
) -> tuple[subprocess.Popen[bytes], Path]:
    """The process, and the file with its lines."""
    lines = upload.with_name(f"{name}.txt")
    with lines.open("w") as told:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(upload), name, str(count), str(threads)],
            stdout=told,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        )
    return writer, lines


def has(lines: Path, least: int) -> bool:
    return lines.read_text().count("\n") >= least


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
    for writer, _ in writers:
        assert writer.wait(timeout=60) == 0
    assert len(check_whole(tmp_path / "repository")) == 2 * 5 * 5


@pytest.mark.parametrize("threads", [1, 8])
def test_killed_writers(tmp_path: Path, files: list[bytes], threads: int) -> None:
    """What a writer was told of is there, also where it was written together with others."""
    upload, folder = tmp_path / "upload.safetensors", tmp_path / "repository"
    upload.write_bytes(files[0])
    rng, digests, told = random.Random(0), list[str](), dict[str, int]()
    for least in (1, 2, 2):  # lines: the first one says that it is ready
        writer, lines = start_writer(folder, upload, "killed", 1_000_000, threads)
        wait_until(partial(has, lines, least))
        time.sleep(rng.uniform(0.05, 0.4))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = [line.split() for line in lines.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
        told |= {id: int(version) for id, version in found}
        digests = check_whole(folder)
    assert digests and told
    repository = Repository(folder)
    assert not {id: version for id, version in told.items() if repository.versions(id)[-1].version < version}
    repository.collect(stale_seconds=-1)
    repository.close()
    assert {path.name for path in (folder / "blobs").iterdir()} == {f"{digest}.safetensors" for digest in digests}
