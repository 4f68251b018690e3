"""Many files of one command, in threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from jpets.app.commands.client.client import NoAnswer
from jpets.app.commands.tasks.files import for_each
from jpets.errors import InvalidTask


@pytest.mark.parametrize("at_once", [1, 3])
def test_files_are_told_in_their_order_and_few_are_begun_ahead(tmp_path: Path, at_once: int) -> None:
    files = [tmp_path / str(number) for number in range(40)]
    begun: list[Path] = []
    told: list[Path] = []

    def work(file: Path) -> Path:
        begun.append(file)
        return file

    def tell(file: Path) -> None:
        told.append(file)
        assert len(begun) <= len(told) + 2 * at_once

    for_each(files, work, tell, at_once)
    assert told == files and sorted(begun) == sorted(files)


@pytest.mark.parametrize("at_once", [1, 3])
def test_one_that_fails_is_told_in_its_place(tmp_path: Path, at_once: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work(file: Path) -> str:
        if file.name == "bad":
            raise InvalidTask("no task")
        return file.name

    told: list[str] = []
    with pytest.raises(typer.Exit) as ended:
        for_each([tmp_path / name for name in ("one", "bad", "two")], work, told.append, at_once)
    assert ended.value.exit_code == 1
    assert told == ["one", "two"]
    assert capsys.readouterr().err == f"error: {tmp_path}/bad: no task\nerror: 1 of 3 files failed\n"


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_was_done_before_a_server_left_is_told(tmp_path: Path, at_once: int) -> None:
    files = [tmp_path / str(number) for number in range(40)]
    done: list[Path] = []

    def work(file: Path) -> Path:
        if file.name == "5":
            raise NoAnswer("no answer")
        done.append(file)
        return file

    told: list[Path] = []
    with pytest.raises(NoAnswer):
        for_each(files, work, told.append, at_once)
    assert told == sorted(done, key=files.index)
    assert 5 <= len(done) <= (5 if at_once == 1 else 5 + 2 * at_once)
