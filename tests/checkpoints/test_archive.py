"""Archives of checkpoints: unpacked where nothing in them reaches anything else."""

from __future__ import annotations

import errno
import shutil
import stat
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from support import FIXTURES

from checkpoints.imports.archive import MAX_RATIO, open_folder
from jpets.errors import InvalidTask, NotFound

LORA = FIXTURES / "imports" / "peft" / "lora"


def packed(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def test_an_archive_of_a_folder_is_that_folder(tmp_path: Path) -> None:
    entries = {f"own/{path.name}": path.read_bytes() for path in LORA.iterdir()}
    with open_folder(packed(tmp_path / "own.zip", entries)) as folder:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in LORA.iterdir()
        }
    assert not folder.exists()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a\\..\\evil", "C:evil"])
def test_names_that_climb_out_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match="leave its folder"), open_folder(packed(tmp_path / "x.zip", {name: b"1"})):
        pass
    assert not (tmp_path / "evil").exists() and not (tmp_path.parent / "evil").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("adapter_config.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(InvalidTask, match="leave its folder"), open_folder(tmp_path / "x.zip"):
        pass


def test_bombs_are_refused_unread(tmp_path: Path) -> None:
    bomb = packed(tmp_path / "bomb.zip", {"adapter_config.json": bytes(64 << 20)})
    assert bomb.stat().st_size * MAX_RATIO < 64 << 20
    with pytest.raises(InvalidTask, match="would unpack to 67108864"), open_folder(bomb):
        pass
    many = packed(tmp_path / "many.zip", {f"{at}": b"" for at in range(100)})
    with pytest.raises(InvalidTask, match="64 files, found 100"), open_folder(many):
        pass


def test_a_directory_of_many_entries_is_refused_unread(tmp_path: Path) -> None:
    """An object is made for each, before they can be counted; here they are named without being there."""
    path = packed(tmp_path / "x.zip", {"a": b"1"})
    content = path.read_bytes()
    start, end = content.index(ENTRY), content.index(END)
    entry, count = content[start:end], 60_000
    tail = bytearray(content[end:])
    for at, value, size in ((8, count, 2), (10, count, 2), (12, count * len(entry), 4)):
        tail[at : at + size] = value.to_bytes(size, "little")
    path.write_bytes(content[:start] + entry * count + tail)
    assert len(zipfile.ZipFile(path).infolist()) == count
    tracemalloc.start()
    with pytest.raises(InvalidTask, match="no zip archive that can be read"), open_folder(path):
        pass
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_what_zipfile_unpacks_without_bound_is_refused(tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        bomb = packed(tmp_path / "x.zip", {"adapter_config.json": bytes(1000)}, compression)
        with pytest.raises(InvalidTask, match="is not stored or deflated"), open_folder(bomb):
            pass


def test_entries_that_cannot_be_unpacked_say_so(tmp_path: Path) -> None:
    damaged = packed(tmp_path / "damaged.zip", {"a": b" ".join(b"%d" % (at * at) for at in range(500))})
    content = bytearray(damaged.read_bytes())
    content[40:60] = bytes(20)
    damaged.write_bytes(content)
    folder = packed(tmp_path / "folder.zip", {"a": b"1", "a/b": b"1"})
    for source in (damaged, folder):
        with pytest.raises(InvalidTask, match="cannot be read"), open_folder(source):
            pass
    with pytest.raises(InvalidTask, match="too long a name"), open_folder(packed(tmp_path / "x.zip", {"a" * 300: b""})):
        pass


def test_what_is_no_archive_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"no archive")
    with pytest.raises(InvalidTask, match="no folder and no zip"), open_folder(tmp_path / "x.zip"):
        pass
    with pytest.raises(NotFound), open_folder(tmp_path / "nowhere"):
        pass


def edited(path: Path, mark: bytes, at: int, value: bytes) -> Path:
    """A good archive, changed ``at`` bytes after the last ``mark``."""
    content = bytearray(packed(path, {"a": b"1"}).read_bytes())
    start = content.rindex(mark) + at
    content[start : start + len(value)] = value
    path.write_bytes(content)
    return path


ENTRY, END = b"PK\1\2", b"PK\5\6"


@pytest.mark.parametrize(("mark", "at", "value"), [(ENTRY, 6, b"\x65"), (END, 12, b"\xff\xff"), (END, 16, b"\xff\xff")])
def test_archives_of_other_versions_and_with_places_outside_are_refused_by_name(
    mark: bytes, at: int, value: bytes, tmp_path: Path
) -> None:
    broken = edited(tmp_path / "broken.zip", mark, at, value)
    with (
        pytest.raises(InvalidTask, match=r"'broken\.zip' is no folder and no zip|'a' cannot be read"),
        open_folder(broken),
    ):
        pass


def test_an_entry_without_a_name_is_refused(tmp_path: Path) -> None:
    for name in (b"\0", b"."):
        nameless = edited(tmp_path / "nameless.zip", ENTRY, 46, name)
        with pytest.raises(InvalidTask, match=r"'nameless\.zip' has an entry without a name"), open_folder(nameless):
            pass


def test_the_disks_own_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"), open_folder(packed(tmp_path / "x.zip", {"a": b"1"})):
        pass
