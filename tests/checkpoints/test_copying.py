"""A repository is copied while it is in use, and restored while it is in use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.blobs import LocalBlobs
from checkpoints.repository import Repository
from jpets.access import Limits
from jpets.errors import Conflict, InvalidTask, NotFound
from jpets.types import TaskName


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Repository, Repository]]:
    with (
        contextlib.closing(Repository(tmp_path / "used")) as used,
        contextlib.closing(Repository(tmp_path / "kept")) as kept,
    ):
        yield used, kept


def told(repository: Repository) -> list[object]:
    """All that a repository says of its tasks; every file must be there."""
    found: list[object] = []
    for task in repository.every():
        for stored in repository.versions(task.id, task.tenant):
            assert repository.read(stored)
            found.append(stored)
        found.append(repository.aliases(task.id, task.tenant))
    return found


def test_a_copy_is_the_same(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    used, kept = pair
    for number, data in enumerate(files[:3]):
        used.put("a", data)
        used.put(f"b-{number}", data, tenant="acme")
    used.rollback("a")
    used.alias("a", "stable", 1)
    used.add_uses({TaskName.of("a"): 4})
    used.keep_backbone("more")
    used.access.limit("acme", Limits(60))
    key, _ = used.access.create("acme")
    assert used.copy_to(kept).versions == 6
    assert told(kept) == told(used)
    assert kept.backbones() == ["more"] and kept.index("m")[0].queries == 4
    assert kept.access.known()[1:] == ([key], {"acme": Limits(60.0)})
    used.delete("b-0", "acme")
    used.put("c", files[3])
    used.copy_to(kept)
    assert told(kept) == told(used), "brought up to date"


def test_a_restore_is_seen_and_gives_no_number_twice(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    used, kept = pair
    used.put("a", files[0])
    used.put("gone", files[1])
    used.copy_to(kept)
    before = told(used)
    assert used.put("a", files[2]).version == 2
    used.put("since", files[3])
    used.delete("gone")
    used.collect()
    seen, _ = used.changes(0)
    kept.copy_to(used)
    assert told(used) == before
    _, changed = used.changes(seen)
    assert {name.id for name in changed} == {"a", "gone", "since"}, "servers look at each of them"
    assert used.put("a", files[2]).version == 3
    with pytest.raises(NotFound):
        used.get("since")
    assert used.put("since", files[3]).version == 2


def test_only_what_differs_is_written(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    """So servers look only at tasks that are others than before."""
    used, kept = pair
    for id in ("alias", "asked", "same", "state"):
        for data in files[:2]:
            digest = used.put(id, data).digest
    used.alias("alias", "stable", 1)
    used.keep_layouts("maker", {digest: "[]"})
    used.keep_backbone("more")
    used.access.create("acme")
    used.access.limit("acme", Limits(60))
    assert used.copy_to(kept) == (8, 4 + 8 + 5)
    assert used.copy_to(kept) == kept.copy_to(used) == (8, 0)
    before = told(used)
    used.alias("alias", "stable", 2)
    used.add_uses({TaskName.of("asked"): 1})
    used.rollback("state")
    seen, _ = used.changes(0)
    assert kept.copy_to(used) == (8, 3)
    assert told(used) == before
    assert used.changes(seen)[1] == [TaskName.of("state")]


def test_keys_revoked_since_stay_revoked(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    used, kept = pair
    used.put("a", files[0])
    old, _ = used.access.create("acme")
    used.copy_to(kept)
    used.access.revoke(old.id)
    new, _ = used.access.create("acme")
    number = used.access.number()
    kept.copy_to(used)
    known = {key.id: key for key in used.access.known().keys}
    assert known[old.id].revoked is not None and known[new.id].revoked is None
    assert used.access.number() == number, "servers need not read them again"


def test_a_key_that_was_revoked_since_the_last_backup_is_revoked_in_it(pair: tuple[Repository, Repository]) -> None:
    used, kept = pair
    key, _ = used.access.create("acme")
    used.access.limit("acme", Limits(60))
    used.copy_to(kept)
    number = kept.access.number()
    used.access.revoke(key.id)
    used.access.limit("acme", Limits(5))
    used.copy_to(kept)
    known = kept.access.known()
    assert known.keys[0].revoked is not None and known.limits == {"acme": Limits(5.0)}
    assert known.number > number


def test_a_tenant_that_came_since_keeps_its_limits(pair: tuple[Repository, Repository]) -> None:
    used, kept = pair
    used.access.create("acme")
    used.copy_to(kept)
    used.access.create("globex")
    for tenant in ("acme", "globex"):
        used.access.limit(tenant, Limits(5))
    kept.copy_to(used)
    assert used.access.known().limits == {"globex": Limits(5.0)}, "acme had none at the time"


def test_a_number_never_names_another_file(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    """Servers that have loaded a version do not look at it again."""
    used, kept = pair
    used.put("a", files[0])
    used.copy_to(kept)
    used.put("a", files[1])
    kept.put("a", files[2])
    before = told(used)
    with pytest.raises(Conflict, match="version 2 of task 'a' is another file"):
        kept.copy_to(used)
    assert told(used) == before
    used.delete("a")
    kept.copy_to(used)
    assert told(used) == told(kept)


def test_a_damaged_file_is_not_copied(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    used, kept = pair
    stored = used.put("a", files[0])
    blobs = used._blobs
    assert isinstance(blobs, LocalBlobs)
    path = blobs.path(stored.digest)
    path.chmod(0o600)
    path.write_bytes(files[0][:-1] + bytes([files[0][-1] ^ 1]))
    with pytest.raises(InvalidTask, match="damaged"):
        used.copy_to(kept)
    assert told(kept) == []
    path.unlink()
    with pytest.raises(Conflict, match=r"the source lacks files.*is not stored"):
        used.copy_to(kept)


def test_a_file_that_is_damaged_in_the_copy_is_copied_again(
    pair: tuple[Repository, Repository], files: list[bytes]
) -> None:
    used, kept = pair
    stored = used.put("a", files[0])
    used.copy_to(kept)
    blobs = kept._blobs
    assert isinstance(blobs, LocalBlobs)
    path = blobs.path(stored.digest)
    path.chmod(0o600)
    path.write_bytes(files[0][:-1])
    assert blobs.damaged(stored.digest) and not blobs.damaged("0" * 64)
    used.copy_to(kept)
    assert told(kept) == told(used) and not blobs.damaged(stored.digest)


def test_copies_while_tasks_come_and_go(pair: tuple[Repository, Repository], files: list[bytes]) -> None:
    """Every copy is one moment: as many versions of ``a`` as of ``b``, or one more."""
    used, kept = pair
    used.put("a", files[0])
    used.put("b", files[0])
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            for id in ("a", "b"):
                used.put(id, files[number % len(files)])
            used.put(f"passing-{number}", files[number % len(files)])
            used.delete(f"passing-{number}")
            used.collect()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(8):
            used.copy_to(kept)
            told(kept)
            newest = [kept.versions(id)[-1].version for id in ("a", "b")]
            assert newest[0] - newest[1] in (0, 1)
            kept.collect(0)
            told(kept)
    finally:
        stop.set()
        writer.join()


def test_files_that_are_always_gone_are_told(
    pair: tuple[Repository, Repository], files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, kept = pair
    used.put("a", files[0])

    def gone(digest: str) -> bytes:
        raise NotFound(digest)

    monkeypatch.setattr(used._blobs, "read", gone)
    with pytest.raises(Conflict):
        used.copy_to(kept)
    assert told(kept) == []
