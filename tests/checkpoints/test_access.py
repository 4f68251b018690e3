"""Keys and limits in a catalogue."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.access import Access
from checkpoints.repository import Repository
from jpets.access import Limits, digest_of_key
from jpets.errors import InvalidInput, InvalidTask, NotFound


@pytest.fixture
def access(tmp_path: Path) -> Iterator[Access]:
    with contextlib.closing(Repository(tmp_path)) as repository:
        yield repository.access


def test_a_key_is_known_only_by_its_digest(access: Access, tmp_path: Path) -> None:
    key, text = access.create("acme", ("manage", "infer"), note="robot")
    assert access.known().keys == [key]
    assert (key.tenant, key.scopes, key.digest) == ("acme", ("infer", "manage"), digest_of_key(text))
    assert text.startswith(f"jpets_{key.id}_") and len(text) > 60
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert text.encode() not in file.read_bytes() and text[-40:].encode() not in file.read_bytes()


def test_keys_differ(access: Access) -> None:
    made = [access.create() for _ in range(20)]
    assert len({text for _, text in made}) == len({key.id for key, _ in made}) == 20


def test_every_change_counts(access: Access) -> None:
    assert access.number() == 0
    key, _ = access.create()
    access.limit("acme", Limits(60))
    access.revoke(key.id)
    assert access.number() == access.known().number == 3


def test_a_revoked_key_stays_revoked(access: Access) -> None:
    key, _ = access.create()
    revoked = access.revoke(key.id)
    assert revoked.revoked is not None and access.revoke(key.id) == revoked
    assert access.known().keys == [revoked]
    with pytest.raises(NotFound):
        access.revoke("none")


def test_limits_are_replaced(access: Access) -> None:
    access.limit("acme", Limits(60, 1000, 2))
    access.limit("acme", Limits(tokens_per_minute=10))
    assert access.known().limits == {"acme": Limits(None, 10.0, 0)}


@pytest.mark.parametrize("limits", [Limits(0), Limits(-1), Limits(float("nan")), Limits(tokens_per_minute=1e13)])
def test_limits_that_are_none(access: Access, limits: Limits) -> None:
    with pytest.raises(InvalidInput):
        access.limit("acme", limits)
    assert not access.known().limits


def test_names_are_checked(access: Access) -> None:
    for tenant in ("", "A", "a/b", "x" * 129):
        with pytest.raises(InvalidTask):
            access.create(tenant)
        with pytest.raises(InvalidTask):
            access.limit(tenant, Limits())
    with pytest.raises(InvalidInput):
        access.create("acme", ())
    with pytest.raises(InvalidInput):
        access.create("acme", ("root",))  # type: ignore[arg-type]


def test_two_processes_see_each_others_keys(access: Access, tmp_path: Path) -> None:
    with contextlib.closing(Repository(tmp_path)) as other:
        key, _ = other.access.create("acme")
        assert access.known().keys == [key]


def test_a_repository_of_an_earlier_release_gets_the_tables(tmp_path: Path) -> None:
    with contextlib.closing(Repository(tmp_path)):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as catalogue:
        for table in ("keys", "limits", "access"):
            catalogue.execute(f"DROP TABLE {table}")
    with contextlib.closing(Repository(tmp_path)) as repository:
        assert repository.access.number() == 0 and not repository.access.known().keys
        repository.access.create()
