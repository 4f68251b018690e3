"""Terminals, pipes and arguments whose encoding lacks what texts and names are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jpets.app.commands.client import client
from jpets.app.commands.client.query import Answer
from jpets.cli import app
from serving.protocols.schemas import ClassifyItem, LabelProb

LABEL = "žluťoučký 日本 é"
ENCODINGS = ("ascii", "latin-1", "utf-8")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a server was asked, which answers each with one label."""
    texts: list[str] = []

    def ask(server: client.Server, model: type, method: str, path: str, body: Any) -> Answer:
        json.dumps(body, ensure_ascii=False).encode()  # no half characters
        texts.extend(each["text"] for each in body["inputs"])
        return Answer(
            data=[ClassifyItem(index=0, label=LABEL, top=[LabelProb(label=LABEL, prob=1.0)]) for _ in body["inputs"]]
        )

    monkeypatch.setattr(client.Server, "ask", ask)
    return texts


def run(encoding: str, *arguments: str, **how: Any) -> Result:
    result = CliRunner(charset=encoding).invoke(app, [*arguments], **how)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_loses_nothing_in_any_encoding(asked: list[str], encoding: str) -> None:
    result = run(encoding, "query", "mood", LABEL, "--json")
    (answer,) = json.loads(result.stdout_bytes.decode(encoding))
    assert (answer["text"], answer["label"]) == (LABEL, LABEL)
    assert asked == [LABEL]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "text", [LABEL, "a text that is so long that it is cut in its middle, with an ellipsis … at last"]
)
def test_tables_show_what_there_is(asked: list[str], encoding: str, text: str) -> None:
    result = run(encoding, "query", "mood", text)
    assert result.exit_code == 0
    assert LABEL.encode(encoding, "backslashreplace") in result.stdout_bytes


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_texts_are_piped_in_as_utf_8(asked: list[str], encoding: str) -> None:
    assert run(encoding, "query", "mood", "-", input=f"\ufeff{LABEL}\r\n\n naïve\n".encode()).exit_code == 0
    assert asked == [LABEL, " naïve"]
    result = run(encoding, "query", "mood", "-", input=b"good\ncaf\xe9\n")
    assert result.exit_code == 1
    assert "line 2 of standard input is not UTF-8 (byte 4)" in result.stderr


def test_arguments_are_utf_8_where_the_locale_has_no_letters_for_them(asked: list[str]) -> None:
    undecoded = LABEL.encode().decode("ascii", "surrogateescape")
    assert run("ascii", "query", "mood", undecoded).exit_code == 0
    assert asked == [LABEL]
    result = run("ascii", "query", "mood", "caf\udce9")
    assert result.exit_code == 1
    assert "expected an argument in UTF-8" in result.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
    ],
)
def test_a_process_finds_folders_and_tells_their_names(tmp_path: Path, variables: dict[str, str]) -> None:
    folder = tmp_path / LABEL
    folder.mkdir()
    (folder / "catalog.sqlite").write_bytes(b"no catalogue" * 100)
    command: list[str | Path] = [sys.executable, "-m", "jpets", "task", "list", "--repository", folder]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"error: ") and b"catalog.sqlite cannot be used" in done.stderr


def test_a_tilde_in_an_option_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_file: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run("utf-8", "task", "add", str(task_file), "--repository=~/tasks").exit_code == 0
    assert (tmp_path / "tasks" / "catalog.sqlite").exists()
    result = run("utf-8", "task", "list", env={"JPETS_REPOSITORY": "~/tasks"})
    assert "topic" in result.stdout
    result = run("utf-8", "task", "add", str(task_file), "--repository=~no-such-user/tasks")
    assert result.exit_code == 1 and "home folder" in result.stderr
    assert not (tmp_path / "~").exists()


def test_a_variable_that_nothing_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("utf-8", "task", "list", env={"JPETS_REPOSITRY": "x"})
    assert result.exit_code == 1
    assert "JPETS_REPOSITRY" in result.stderr and "did you mean JPETS_REPOSITORY?" in result.stderr
