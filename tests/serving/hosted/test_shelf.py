"""The folder of backbones that a server may load, and that jobs add to."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import cast

import pytest

from checkpoints.repository import Repository
from jpets.app.hosting import Shelf
from jpets.errors import Conflict
from jpets.files import STALE_SECONDS
from serving.options.options import Options

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "backbones"
    made.mkdir()
    return made


def shelf_of(folder: Path) -> Shelf:
    return Shelf(Options.model_validate({"demo": True, "backbones": folder}), cast(Repository, None))


def test_what_was_taken_in_before_a_crash_is_taken_in_once(folder: Path) -> None:
    shelf = shelf_of(folder)
    for _ in range(2):
        shelf.add("domain", FIXTURES / "tiny-bert")
    assert (list(shelf.names()), sorted(folder.iterdir())) == (["domain"], [folder / "domain"])


@pytest.mark.parametrize("changed", ["other bytes", "one less", "one more"])
def test_a_name_that_is_anothers_is_refused(folder: Path, changed: str) -> None:
    shutil.copytree(FIXTURES / "tiny-bert", folder / "domain")
    file = folder / "domain" / "config.json"
    if changed == "other bytes":
        file.write_bytes(file.read_bytes().replace(b"2", b"3"))
    elif changed == "one less":
        file.unlink()
    else:
        (folder / "domain" / "notes.txt").touch()
    before = {path.name: path.read_bytes() for path in (folder / "domain").iterdir()}
    with pytest.raises(Conflict, match="there is a backbone 'domain' already"):
        shelf_of(folder).add("domain", FIXTURES / "tiny-bert")
    assert {path.name: path.read_bytes() for path in (folder / "domain").iterdir()} == before


def test_half_copied_backbones_of_dead_servers_go(folder: Path) -> None:
    for name in (".tmp-old", ".tmp-new"):
        shutil.copytree(FIXTURES / "tiny-bert", folder / name)
    os.utime(folder / ".tmp-old", (time.time() - STALE_SECONDS - 60,) * 2)
    os.utime(folder / ".tmp-new")
    assert not shelf_of(folder).names()
    assert [path.name for path in folder.iterdir()] == [".tmp-new"]
