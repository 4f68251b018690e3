"""Files of figures that several processes add to."""

from __future__ import annotations

import json
import pathlib
from typing import NoReturn

import pytest

from jpets.engine.programs.shared_file import SharedFile


def figures(path: pathlib.Path) -> SharedFile[dict[str, int]]:
    return SharedFile(path, "costs", json.loads, json.dumps)


def test_a_damaged_file_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("{", encoding="utf-8")
    assert figures(path).read() is None
    assert not path.exists()


def test_a_file_that_cannot_be_read_now_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    own = figures(path)
    assert own.update(lambda stored: {**(stored or {}), "a": 1}) == {"a": 1}

    def too_many(*arguments: object, **how: object) -> NoReturn:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(pathlib.Path, "read_text", too_many)
        assert own.read() is None
        assert own.update(lambda stored: {"b": 2}) is None, "what others wrote is not overwritten"
    assert own.update(lambda stored: {**(stored or {}), "c": 3}) == {"a": 1, "c": 3}
