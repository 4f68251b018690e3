from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from checkpoints.blobs import LocalBlobs, digest_of
from jpets.errors import NotFound, OutOfSpace


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path / "blobs")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_put_read_delete(blobs: LocalBlobs, tmp_path: Path) -> None:
    digest = blobs.put(b"one")
    assert digest == blobs.put(b"one") == digest_of(b"one")
    assert blobs.read(digest) == blobs.path(digest).read_bytes() == b"one"
    assert blobs.exists(digest)
    assert list(blobs.list()) == [digest]
    assert names(tmp_path / "blobs") == [f"{digest}.safetensors"]
    blobs.delete(digest)
    blobs.delete(digest)
    assert not blobs.exists(digest)
    with pytest.raises(NotFound, match="is not stored"):
        blobs.read(digest)


@pytest.mark.parametrize("digest", ["", "..", "../" + "a" * 61, "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_digests_only(blobs: LocalBlobs, digest: str) -> None:
    with pytest.raises(NotFound, match="64 hexadecimal digits"):
        blobs.read(digest)


def test_half_a_blob_is_replaced(blobs: LocalBlobs) -> None:
    digest = digest_of(b"whole")
    blobs.path(digest).write_bytes(b"who")
    blobs.put(b"whole")
    assert blobs.read(digest) == b"whole"


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(blobs: LocalBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OutOfSpace, match="disk is full"):
            blobs.put(b"one")
    assert names(tmp_path / "blobs") == []


def test_short_writes_are_continued(blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    assert blobs.read(blobs.put(b"0123456789")) == b"0123456789"


def test_order_of_a_write(blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def record(*arguments: object, name: str = name, real: object = real) -> object:
            calls.append(name)
            return real(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(os, name, record)
    blobs.put(b"one")
    blobs.put(b"one")
    assert calls == ["write", "fsync", "replace"]
    blobs.sync()
    assert calls[3:] == ["fsync"]


def test_sweep_removes_what_dead_writers_left(blobs: LocalBlobs, tmp_path: Path) -> None:
    digest = blobs.put(b"one")
    for name, age in ((".tmp-old", 100), (".tmp-new", 0)):
        path = tmp_path / "blobs" / name
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert blobs.sweep(50) == 1
    assert names(tmp_path / "blobs") == [".tmp-new", f"{digest}.safetensors"]


@pytest.mark.parametrize("links", [True, False])
def test_the_first_owner_stays(blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    """Also on file systems without hard links, as mounts of object stores are."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    blobs.own("1" * 32)
    blobs.own("2" * 32)
    assert blobs.owner() == "1" * 32
