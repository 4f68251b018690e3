"""Commands that wait for a server, or for hours of training: what ends them, and what does not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import typer

from jpets.app.commands.client import waiting
from jpets.app.commands.client.client import NoAnswer
from jpets.app.commands.client.jobs import pack
from jpets.app.commands.client.waiting import looks
from jpets.app.commands.options import check_new_folder
from jpets.errors import Conflict, JpetsError, NotFound, OverQuota, Saturated


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOON", "LATER"):
        monkeypatch.setattr(waiting, name, 0.001)


def test_a_server_that_starts_again_or_has_no_room_is_waited_for() -> None:
    said: list[int | JpetsError] = [
        1,
        NoAnswer("no answer"),
        OverQuota("slowly"),
        Saturated("full"),
        2,
        NotFound("gone"),
    ]

    def look() -> int:
        each = said.pop(0)
        if isinstance(each, JpetsError):
            raise each
        return each

    found = looks(look)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(NotFound, match="gone"):
        next(found)


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.01)

    def look() -> int:
        raise NoAnswer("no answer")

    with pytest.raises(NoAnswer):
        next(looks(look))


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    check_new_folder(tmp_path / "new" / "deep")
    (tmp_path / "there").mkdir()
    with pytest.raises(Conflict, match="exists already"):
        check_new_folder(tmp_path / "there")
    (tmp_path / "file").touch()
    with pytest.raises(typer.BadParameter, match="nothing may be written into 'file'"):
        check_new_folder(tmp_path / "file" / "new")


@pytest.mark.parametrize("modules", [True, False])
def test_the_folders_of_a_sentence_models_modules_are_sent_too(tmp_path: Path, *, modules: bool) -> None:
    source = tmp_path / "source"
    for name in ("config.json", "model.safetensors", "notes.md", "1_Pooling/config.json", "runs/log.txt", "a/b/c.json"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    if modules:
        (source / "modules.json").write_text("[]")
    texts = tmp_path / "texts.csv"
    texts.write_text("text\na\n")
    names = zipfile.ZipFile(pack(source, texts, tmp_path / "sent.zip")).namelist()
    expected = ["config.json", "model.safetensors", "texts.csv"]
    assert sorted(names) == sorted(expected + ["modules.json", "1_Pooling/config.json", "runs/log.txt"] * modules)
