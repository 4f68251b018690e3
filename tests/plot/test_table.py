"""Files of n-gram vectors: what comes back, what is refused, and what a crash leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from jpets.errors import Conflict, InvalidTable
from jpets.plot import table
from jpets.plot.ngrams import Window, keys_of
from jpets.plot.table import BLOCK_BYTES, BUILDING, HEADER_BYTES, Header, Parts, Table, TableInfo, TableWriter

INFO = TableInfo("layers-1", Window.of(3), 64)


def some_keys(count: int, size: int = 3) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.unique(keys_of(rng.integers(0, 50, (count, size))))


def some_values(entries: int, size: int = 3) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((entries, size, 64)).astype(ml_dtypes.bfloat16)


def write(folder: Path, entries: int = 3000, info: TableInfo = INFO) -> Path:
    keys = some_keys(entries, info.window.size)
    with contextlib.closing(TableWriter(folder, info, keys)) as writer:
        values = some_values(len(keys), info.window.size)
        for at in range(0, len(keys), 700):
            writer.append(values[at : at + 700])
        return writer.finish()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("entries", [0, 1, 3000])
def test_what_was_written_comes_back(size: int, entries: int, tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, window=Window.of(size))
    path = write(tmp_path, entries, info)
    own, keys = Table(path, info), some_keys(entries, size)
    assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.stat().st_mode & 0o222 == 0
    assert (own.keys == keys).all() and (own.values == some_values(len(keys), size)).all()
    own.check_all()
    asked = np.concatenate([keys, keys_of(np.full((1, size), 51))])[::-1]
    assert own.find(asked).tolist() == [-1, *range(len(keys))[::-1]]
    assert write(tmp_path, entries, info) == path, "the same content has the same name"


def flip(path: Path, at: int) -> None:
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def parts_of(path: Path) -> Parts:
    header = Header.read(path.read_bytes()[:HEADER_BYTES], path.stem)
    return Parts(header.info, header.entries)


@pytest.mark.parametrize(
    ("part", "message"), [("header", "header is damaged"), ("keys", "keys are damaged"), ("digests", "digests are")]
)
def test_a_damaged_file_is_refused(part: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    flip(path, 100 if part == "header" else getattr(parts_of(path), part) + 5)
    with pytest.raises(InvalidTable, match=message):
        Table(path, INFO)


@pytest.mark.parametrize("more", [-1, -4096, 1])
def test_a_file_of_another_size_is_refused(more: int, tmp_path: Path) -> None:
    path = write(tmp_path)
    os.chmod(path, 0o644)
    os.truncate(path, path.stat().st_size + more)
    with pytest.raises(InvalidTable, match=r"must have [\d,]+ bytes"):
        Table(path, INFO)


def test_a_damaged_vector_is_never_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    flip(path, HEADER_BYTES + BLOCK_BYTES + 10)
    own, each = Table(path, INFO), INFO.row_bytes
    start = np.arange(own.entries) * each
    damaged = np.flatnonzero((start + each > BLOCK_BYTES) & (start < 2 * BLOCK_BYTES))
    own.check(np.setdiff1d(np.arange(own.entries), damaged))
    for row in damaged[[0, len(damaged) // 2, -1]]:  # the first and the last lie in two blocks
        with pytest.raises(InvalidTable, match="block 1"):
            own.check(np.array([row]))
    with pytest.raises(InvalidTable, match="block 1"):
        own.check_all()
    monkeypatch.setattr(table, "hashlib", None)  # a block is read for its digest once
    with pytest.raises(InvalidTable, match="block 1"):
        own.check(damaged)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(INFO, layers="layers-2"),
        dataclasses.replace(INFO, width=32),
        dataclasses.replace(INFO, window=Window.of(2)),
        dataclasses.replace(INFO, window=Window.of(3, causal=True)),
    ],
)
def test_a_table_of_another_backbone_is_refused(other: TableInfo, tmp_path: Path) -> None:
    with pytest.raises(InvalidTable, match="must be of"):
        Table(write(tmp_path), other)


def test_an_open_table_outlives_its_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    own = Table(path, INFO)
    path.unlink()
    own.check_all()
    assert (own.values == some_values(own.entries)).all()
    with pytest.raises(FileNotFoundError):
        Table(path, INFO)


def test_a_writer_that_is_killed_before_its_file_has_a_name_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    writer = TableWriter(tmp_path, INFO, some_keys(3000))
    assert writer.written == len(some_keys(3000))
    own = Table(writer.finish(), INFO)
    own.check_all()
    assert (own.values == some_values(own.entries)).all() and not list(tmp_path.glob(f"{BUILDING}*"))


def test_a_file_that_never_had_a_header_is_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write a file's length before its vectors, and then lose power."""
    with monkeypatch.context() as killed:
        killed.setattr(os, "fsync", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    (unfinished,) = tmp_path.glob(f"{BUILDING}*")
    keys = some_keys(3000)
    assert unfinished.stat().st_size == Parts(INFO, len(keys)).end
    with contextlib.closing(TableWriter(tmp_path, INFO, keys)) as writer:
        assert writer.written == 0


def test_a_table_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with contextlib.closing(TableWriter(tmp_path, INFO, some_keys(3000))) as first:
        with pytest.raises(Conflict, match="another process"):
            TableWriter(tmp_path, INFO, some_keys(3000))
        first.append(some_values(1))
    TableWriter(tmp_path, INFO, some_keys(3000)).close()


def test_a_killed_writer_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    expected = write(tmp_path / "whole").read_bytes()
    monkeypatch.setattr(table, "SYNC_BYTES", 500 * INFO.row_bytes)
    keys, values, at = some_keys(3000), some_values(len(some_keys(3000))), 0
    for _ in range(50):
        writer = TableWriter(tmp_path, INFO, keys)
        assert writer.written >= at - 500, "only what was not sure is lost"
        at = writer.written
        for _ in range(4):
            writer.append(values[at : at + 200])
            at = writer.written
        if at == len(keys):
            break
        writer._write(bytes(INFO.row_bytes // 2), writer._at(at))  # half of what came next
        writer.close()
    path = writer.finish()
    assert path.read_bytes() == expected
    assert not list(tmp_path.glob(f"{BUILDING}*"))
