"""Log lines: fields are part of them, and the text of an exception, which may quote a query, never is."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from serving.http.logs import FieldFormatter, places, set_up_logging


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    try:
        raise ValueError("a secret text")
    except ValueError:
        made = logging.LogRecord("jpets.x", logging.WARNING, __file__, 1, message, args, sys.exc_info())
    vars(made).update(fields)
    return made


@pytest.mark.parametrize("as_json", [True, False])
def test_an_exception_is_told_by_its_type(as_json: bool) -> None:
    line = FieldFormatter(as_json).format(record("a batch failed"))
    assert "secret" not in line and "Traceback" not in line and "ValueError" in line
    assert len(line.splitlines()) == 1


def test_fields_of_a_line() -> None:
    made = record("%d tasks", 3, task="topic", why='not "there"', lines="a\nb", empty="")
    line = FieldFormatter(as_json=False).format(made)
    time, rest = line.split(" ", 1)
    assert time.endswith("+00:00")
    assert rest == (r'warning jpets.x 3 tasks task=topic why="not \"there\"" lines="a\nb" empty="" error=ValueError')


def test_a_line_for_programs() -> None:
    found = json.loads(FieldFormatter(as_json=True).format(record("%d tasks", 3, task="topic", of=object)))
    assert found.pop("time") and found == {
        "level": "warning",
        "logger": "jpets.x",
        "message": "3 tasks",
        "task": "topic",
        "of": str(object),
        "error": "ValueError",
    }


def test_what_is_asked_for_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    quiet = {name: logging.getLogger(name).level for name in ("jax", "httpx")}
    try:
        set_up_logging("info", as_json=True)
        logging.getLogger("jpets.x").info("told")
        logging.getLogger("jpets.x").debug("not told")
        logging.getLogger("httpx").info("a library's")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        for name, own in quiet.items():
            logging.getLogger(name).setLevel(own)
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["told"]


def test_places_name_no_folder() -> None:
    error = record("a").exc_info
    assert error is not None and error[1] is not None
    assert places(error[1]).startswith("test_logs.py:") and "/" not in places(error[1])
