"""PostgreSQL tells of each change when it is committed. Where nothing is heard, looks go by time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgresql import fresh_schema
from support import wait_until

import jpets.repeated
from checkpoints import listening
from checkpoints.catalog import VERSIONS
from checkpoints.repository import Repository
from jpets.access import Limits
from jpets.repeated import Repeated
from jpets.types import TaskName
from jpets.watch import Watch

Open = Callable[..., Repository]
NEVER = 3600.0
PATIENCE = 60.0
LISTENING = "FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND usename = 'jpets'"


@pytest.fixture
def writer(open_shared: Open) -> Repository:
    return open_shared("writer")


@pytest.fixture
def reader(open_shared: Open) -> Repository:
    return open_shared("reader")


@pytest.fixture
def watches(writer: Repository, reader: Repository) -> tuple[Watch, Watch]:
    """The reader's for tasks and for keys: both are told of changes, and wait for the first."""
    tasks, keys = reader.watch(), reader.access.watch()
    wait_until(lambda: tasks.told and keys.told)
    reader.watch()  # made once both are woken
    for watch in (tasks, keys):
        watch.wait(0)
    return tasks, keys


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told of changes never looks without one."""
    monkeypatch.setattr(jpets.repeated, "CHECK_SECONDS", NEVER)


@contextlib.contextmanager
def following(repository: Repository, watch: Watch, period: float) -> Iterator[list[int]]:
    """The numbers of changes that a follower saw."""
    seen: list[int] = []
    follower = Repeated(lambda: seen.append(repository.last_change()), "following", period, watch)
    follower.start()
    try:
        yield seen
    finally:
        follower.close()


def test_each_change_of_tasks_is_told(writer: Repository, watches: tuple[Watch, Watch], files: list[bytes]) -> None:
    tasks, keys = watches
    for change in (
        lambda: writer.put("a", files[0]),
        lambda: writer.put("a", files[1]),
        lambda: writer.rollback("a"),
        lambda: writer.discard("a", 2),
        lambda: writer.delete("a"),
    ):
        change()
        assert tasks.wait(PATIENCE)
    assert not keys.wait(0)


def test_each_change_of_keys_and_limits_is_told(writer: Repository, watches: tuple[Watch, Watch]) -> None:
    tasks, keys = watches
    key, _ = writer.access.create("acme")
    assert keys.wait(PATIENCE)
    writer.access.revoke(key.id)
    assert keys.wait(PATIENCE)
    writer.access.limit("acme", Limits(priority=1))
    assert keys.wait(PATIENCE)
    assert not tasks.wait(0)


def test_what_changes_nothing_that_is_served_is_not_told(
    writer: Repository, watches: tuple[Watch, Watch], files: list[bytes]
) -> None:
    tasks, keys = watches
    stored = writer.put("a", files[0])
    assert tasks.wait(PATIENCE)
    writer.add_uses({TaskName.of("a"): 2})
    writer.keep_layouts("maker", {stored.digest: "[]"})
    writer.alias("a", "stable", 1)
    writer.keep_backbone("domain")
    writer.access.create()
    assert keys.wait(PATIENCE) and not tasks.wait(0)


def test_a_change_is_told_when_it_is_committed(
    writer: Repository, watches: tuple[Watch, Watch], files: list[bytes], schema: str
) -> None:
    import psycopg

    tasks, keys = watches
    writer.put("a", files[0])
    assert tasks.wait(PATIENCE)
    with contextlib.suppress(ZeroDivisionError), writer._catalog.write() as connection:
        connection.execute(sa.update(VERSIONS).values(state="withdrawn"))
        raise ZeroDivisionError
    writer.access.create()
    assert keys.wait(PATIENCE) and not tasks.wait(0)
    with writer._catalog.write() as connection, psycopg.connect(schema, autocommit=True) as other:
        connection.execute(sa.update(VERSIONS).values(state="withdrawn"))
        other.execute("UPDATE access SET number = number + 1")
        assert keys.wait(PATIENCE) and not tasks.wait(0)
    assert tasks.wait(PATIENCE)


def test_schemas_of_a_database_are_told_apart(
    writer: Repository, watches: tuple[Watch, Watch], files: list[bytes], postgresql: sa.URL, tmp_path: Path
) -> None:
    tasks, keys = watches
    with (
        fresh_schema(postgresql, "of_another") as schema,
        contextlib.closing(Repository.open(tmp_path / "another", catalogue=schema)) as another,
    ):
        another.put("a", files[0])
        writer.access.create()
        assert keys.wait(PATIENCE) and not tasks.wait(0)


@pytest.mark.usefixtures("seldom")
def test_a_change_that_is_told_is_seen_before_the_next_look(
    writer: Repository, reader: Repository, files: list[bytes]
) -> None:
    before = threading.enumerate()
    with following(reader, reader.watch(), NEVER) as seen:
        for number in (1, 2, 3):
            writer.put("a", files[number])
            wait_until(lambda: writer.last_change() in seen)
    assert not [each for each in threading.enumerate() if each.name == "jpets-repeated" and each not in before]


@pytest.mark.usefixtures("seldom")
def test_a_call_that_left_something_is_repeated_without_a_change(reader: Repository) -> None:
    watch, calls = reader.watch(), list[int]()
    wait_until(lambda: watch.told)

    def call() -> bool:
        calls.append(len(calls))
        return len(calls) < 9

    follower = Repeated(call, "following", 0.01, watch)
    follower.start()
    wait_until(lambda: len(calls) == 9)
    follower.close()


@pytest.mark.usefixtures("seldom")
def test_a_lost_connection_is_made_again_and_looks_go_by_time_meanwhile(
    writer: Repository, reader: Repository, files: list[bytes], schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    import psycopg

    watch = reader.watch()
    with psycopg.connect(schema, autocommit=True) as connection, following(reader, watch, 0.01) as seen:
        wait_until(lambda: watch.told)
        connection.execute("ALTER ROLE jpets NOLOGIN")
        try:
            assert connection.execute(f"SELECT pg_terminate_backend(pid) {LISTENING}").fetchall() == [(True,)]
            wait_until(lambda: not watch.told)
            writer.put("a", files[0])
            wait_until(lambda: writer.last_change() in seen)
            assert not watch.told
        finally:
            connection.execute("ALTER ROLE jpets LOGIN")
        wait_until(lambda: watch.told)
        for number in (1, 2):
            writer.put("a", files[number])
            wait_until(lambda: writer.last_change() in seen)
    assert [record.name for record in caplog.records] == ["checkpoints.listening"], "it is said once"


@pytest.mark.usefixtures("seldom")
def test_a_connection_that_hears_nothing_is_not_relied_on(
    writer: Repository, reader: Repository, files: list[bytes], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler, which answers to ``LISTEN`` and passes nothing on."""
    import psycopg

    monkeypatch.setattr(listening, "LISTEN", "SELECT 1")
    with psycopg.connect(schema, autocommit=True) as connection:
        connection.execute("LISTEN jpets_changes")
        watch = reader.watch()
        assert list(connection.notifies(timeout=PATIENCE, stop_after=1)), "the connection was tried out"
    with following(reader, watch, 0.01) as seen:
        writer.put("a", files[0])
        wait_until(lambda: writer.last_change() in seen)
        assert not watch.told


def test_an_end_leaves_no_connection(writer: Repository, reader: Repository, schema: str) -> None:
    import psycopg

    watch = reader.watch()
    wait_until(lambda: watch.told)
    reader.close()
    with psycopg.connect(schema, autocommit=True) as connection:
        wait_until(lambda: connection.execute(f"SELECT pid {LISTENING}").fetchall() == [])
    wait_until(lambda: "jpets-listener" not in {thread.name for thread in threading.enumerate()})


def test_a_catalogue_that_tells_of_nothing_tells_once_it_is_opened(
    writer: Repository, open_shared: Open, schema: str, files: list[bytes]
) -> None:
    """As one of an earlier release, of which a server still runs."""
    import psycopg

    with psycopg.connect(schema, autocommit=True) as connection:
        connection.execute("DROP FUNCTION tell_change CASCADE")
    watch = open_shared("reader").watch()
    wait_until(lambda: watch.told)
    for number in (0, 1):
        writer.put("a", files[number])
        assert watch.wait(PATIENCE)


def test_sqlite_tells_of_nothing(tmp_path: Path, files: list[bytes]) -> None:
    with contextlib.closing(Repository(tmp_path)) as repository:
        watch = repository.watch()
        repository.put("a", files[0])
        assert not watch.wait(0) and not watch.told
        with following(repository, watch, 0.01) as seen:
            wait_until(lambda: 1 in seen)
