"""A catalogue in PostgreSQL, which several machines share, and what a URL of one may be."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgresql import PASSWORD

import checkpoints.catalog
from checkpoints.blobs import digest_of
from checkpoints.catalog import TASKS, VERSIONS, Catalog
from checkpoints.repository import Repository
from jpets.errors import InvalidInput, NotFound, OutOfSpace, Saturated
from jpets.types import TaskName

Open = Callable[..., Repository]


def test_a_database_is_backed_up_into_a_folder_and_restored(
    open_shared: Open, files: list[bytes], tmp_path: Path
) -> None:
    here, there = open_shared("here"), open_shared("there")
    here.put("one", files[0])
    here.put("two", files[1], tenant="acme")
    key, _ = here.access.create("acme")
    with contextlib.closing(Repository(tmp_path / "backup")) as kept:
        assert there.copy_to(kept).versions == 2
        assert kept.read(kept.get("two", "acme")) == files[1] and kept.access.known().keys == [key]
        here.put("one", files[2])
        here.delete("two", "acme")
        here.collect()
        seen, _ = there.changes(0)
        assert kept.copy_to(here).versions == 2
    assert there.get("one").version == 1 and there.read(there.get("two", "acme")) == files[1]
    assert set(there.changes(seen)[1]) == {TaskName.of("one"), TaskName("acme", "two")}
    assert there.put("one", files[3]).version == 3


def test_machines_that_start_at_once_hear_of_each_other(open_shared: Open, files: list[bytes]) -> None:
    with ThreadPoolExecutor(4) as pool:
        first, second, *_ = pool.map(open_shared, "abcd")
    first.put("one", files[0])
    seen, changed = second.changes(0)
    assert changed == [TaskName.of("one")] and second.read(second.get("one")) == files[0]
    second.put("one", files[1])
    second.delete("one")
    assert first.changes(seen)[1] == [TaskName.of("one")]
    with pytest.raises(NotFound):
        first.get("one")
    assert not (first.folder / "catalog.sqlite").exists() and not (first.folder / "blobs").exists()


def test_a_writer_waits_for_another_and_readers_do_not(
    open_shared: Open, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the numbers of changes are seen in their order, whoever commits first."""
    monkeypatch.setattr(checkpoints.catalog, "BUSY_SECONDS", 0.05)
    first, second = open_shared("a"), open_shared("b")
    first.put("a", files[0])
    with first._catalog.write() as connection:
        connection.execute(sa.update(VERSIONS).values(state="uploaded"))
        with pytest.raises(Saturated, match="busy for too long"):
            second.put("b", files[1])
        assert second.get("a").served
        open_shared("c")
    assert not second.get("a").served
    second.put("b", files[1])
    assert second.changes(0)[1] == [TaskName.of("a"), TaskName.of("b")]


def test_a_reader_has_one_view(open_shared: Open, files: list[bytes]) -> None:
    first, second = open_shared("a"), open_shared("b")
    with first._catalog.read() as connection:
        assert connection.execute(sa.select(TASKS)).all() == []
        second.put("a", files[0])
        assert connection.execute(sa.select(VERSIONS)).all() == []
    assert first.get("a").version == 1


def test_changes_by_other_programs_count(open_shared: Open, schema: str, files: list[bytes]) -> None:
    import psycopg

    repository = open_shared("a")
    repository.put("a", files[0])
    for statement in ("UPDATE versions SET state = 'active'", "DELETE FROM versions"):
        seen, _ = repository.changes(0)
        with psycopg.connect(schema, autocommit=True) as connection:
            connection.execute(statement)
        assert repository.changes(seen)[1] == [TaskName.of("a")]


def test_texts_that_postgresql_does_not_take(open_shared: Open, files: list[bytes]) -> None:
    """It has no NUL, and its JSON no escape of one."""
    repository = open_shared("a")
    stored = repository.put("a", files[0])
    document = json.dumps({"odd": 'a\0b \\u0000 \\\0 "\ud800', **stored.metadata, "last": "\\"})
    with repository._catalog.write() as connection:
        connection.execute(sa.update(VERSIONS).values(metadata=document))
    assert repository.index("maker")[0].backbone == stored.metadata["backbone"]["fingerprint"]
    assert repository.get("a").metadata["odd"] == 'a\0b \\u0000 \\\0 "\ud800'
    for odd in ("\0", "a\0"):
        with pytest.raises(NotFound):
            repository.get(odd)
        with pytest.raises(NotFound):
            repository.get("a", version=odd)
    assert repository.list(after="\0")[0] == [repository.get("a")]


def test_ids_are_in_the_order_of_their_letters(open_shared: Open, files: list[bytes]) -> None:
    repository = open_shared("a")
    ids = ["b", "a_c", "a-b", "ab", "a", "a0", "a.b"]
    for id in ids:
        repository.put(id, files[0])
    assert [stored.id for stored in repository.list()[0]] == sorted(ids)
    assert [task.id for task in repository.index("maker")] == sorted(ids)


def test_a_connection_that_was_lost_is_made_again(open_shared: Open, schema: str, files: list[bytes]) -> None:
    import psycopg

    first = open_shared("a")
    first.put("a", files[0])
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'jpets'"
    with psycopg.connect(schema, autocommit=True) as connection:
        connection.execute(end)
    assert first.put("a", files[1]).version == 2
    with (
        psycopg.connect(schema, autocommit=True) as connection,
        pytest.raises(Saturated, match="cannot be reached"),
        first._catalog.write() as held,
    ):
        connection.execute(end)
        held.execute(sa.select(VERSIONS))
    assert first.get("a").version == 2


@pytest.mark.parametrize(
    ("state", "error"), [("53100", OutOfSpace), ("57P03", Saturated), ("42P01", sa.exc.DBAPIError)]
)
def test_what_the_server_says_is_told(open_shared: Open, state: str, error: type[Exception]) -> None:
    repository = open_shared("a")
    with pytest.raises(error), repository._catalog.write() as connection:
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$")


WRITER = """
import sys
from pathlib import Path
from checkpoints.repository import Repository

folder, url, blobs, upload, name, count = sys.argv[1:]
data = Path(upload).read_bytes()
repository = Repository.open(folder, catalogue=url, blobs=blobs, validator=lambda data, id: task)
from checkpoints.task_file import read_task
task = read_task(data, id=name)
print("ready", flush=True)
for number in range(int(count)):
    repository.put(f"{name}-{number % 3}", data + str((name, number)).encode())
    if number == 5:
        print("going", flush=True)
    if number % 7 == 0:
        repository.collect()
"""


def test_processes_and_one_that_is_killed(open_shared: Open, schema: str, files: list[bytes], tmp_path: Path) -> None:
    upload = tmp_path / "upload.safetensors"
    upload.write_bytes(files[0])

    def start(name: str, count: int) -> subprocess.Popen[str]:
        places = [tmp_path / name, schema, f"file://{tmp_path}/blobs", upload, name, count]
        command = [sys.executable, "-c", WRITER, *map(str, places)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])

    killed, whole = start("killed", 1_000_000), start("whole", 30)
    assert killed.stdout is not None
    assert [killed.stdout.readline() for _ in range(2)] == ["ready\n", "going\n"]
    killed.send_signal(signal.SIGKILL)
    for writer in (killed, whole):
        writer.communicate(timeout=60)
    assert whole.returncode == 0
    repository = open_shared("reader")
    repository.collect(stale_seconds=-1)
    found = [stored for task in repository.list()[0] for stored in repository.versions(task.id)]
    assert [stored.version for stored in repository.versions("whole-0")] == [6, 7, 8, 9, 10]
    assert {stored.id for stored in found} == {
        f"{name}-{number}" for name in ("killed", "whole") for number in range(3)
    }
    for stored in found:
        assert digest_of(repository.read(stored)) == stored.digest
    names = {path.name for path in (tmp_path / "blobs").glob("*.safetensors")}
    assert names == {f"{stored.digest}.safetensors" for stored in found}


# --- URLs ---


def test_a_wrong_password_is_not_shown(postgresql: sa.URL) -> None:
    wrong = postgresql.set(password="also-secret").render_as_string(hide_password=False)
    with pytest.raises(Saturated, match="cannot be reached") as caught:
        Catalog(wrong)
    error: BaseException | None = caught.value
    while error is not None:
        assert not any(secret in f"{error} {error!r}" for secret in ("also-secret", PASSWORD))
        error = error.__cause__


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@host/x",
        "postgresql//me:secret@host",
        "postgresql://me:secret@host:no/x",
        "secret",
        "",
        "sqlite://",
        "sqlite:///:memory:",
    ],
)
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"a catalogue.*sqlite:////") as caught:
        Catalog(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("driver", ["sqlite+aiosqlite", "postgresql+asyncpg", "postgresql+no_such"])
def test_drivers_that_cannot_be(driver: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"a catalogue.*driver") as caught:
        Catalog(f"{driver}://me:secret@{'' if 'sqlite' in driver else 'host'}/{tmp_path}/x")
    assert "secret" not in str(caught.value)


def test_sqlite_by_url_is_the_same(tmp_path: Path, files: list[bytes]) -> None:
    first = Repository(tmp_path)
    first.put("a", files[0])
    second = Repository.open(
        tmp_path / "other", catalogue=f"sqlite:///{tmp_path}/catalog.sqlite", blobs=f"{tmp_path}/blobs"
    )
    assert second.read(second.get("a")) == files[0]
    second.put("a", files[1])
    assert first.changes(1) == (2, [TaskName.of("a")])
    for repository in (first, second):
        repository.close()
