"""Long work without a terminal says how far it is."""

from __future__ import annotations

import logging
import threading

import pytest
from rich.progress import Task

from jpets.app.commands import bars
from jpets.app.commands.bars import Bars
from jpets.app.commands.output import busy, progress_bars, reporting
from jpets.app.server import Display

WAIT = 20.0
"""Seconds after which a line that did not come is missed."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set by the first line; lines come at once."""
    came = threading.Event()
    real = bars._print

    def tell(task: Task) -> None:
        real(task)
        came.set()

    monkeypatch.setattr(bars, "TOLD_EVERY", 0.001)
    monkeypatch.setattr(bars, "_print", tell)
    return came


def test_work_without_an_end_is_told(told: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    with busy("read backbone"):
        assert told.wait(WAIT)
    assert "read backbone: 0 s\n" in capsys.readouterr().err


def test_steps_are_counted_though_one_of_them_takes_long(
    told: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporting() as report:
        report("programs", 3, 20)
        told.clear()
        assert told.wait(WAIT)
    assert "programs: 3/20, 0 s\n" in capsys.readouterr().err


def test_bytes_are_per_cent(told: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars(enabled=False) as shown:
        shown.add_task("upload", total=50_000_000, completed=20_000_000)
        assert told.wait(WAIT)
    assert "upload: 40 %, 0 s\n" in capsys.readouterr().err


def test_a_server_logs_its_start(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "TOLD_EVERY", 0.001)
    came = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "programs", None) == "1/2" and record.msg == "starting":
                came.set()

    log = logging.getLogger("jpets.serve")
    handler = Seen()
    log.addHandler(handler)
    try:
        with caplog.at_level("INFO", "jpets.serve"), Display() as display:
            display.show("programs", 1, 2)
            assert came.wait(WAIT)
            display.show("programs", 2, 2)
    finally:
        log.removeHandler(handler)
    assert any(getattr(record, "programs", None) == "2/2" for record in caplog.records)


def test_the_end_of_work_ends_its_lines(told: threading.Event) -> None:
    with Bars() as shown:
        shown.add_task("work", total=None)
        assert told.wait(WAIT)
    assert not any(thread.name == "jpets-progress" for thread in threading.enumerate())
