"""Trials in a process of their own, with processes that crash, hang, or run out of time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from jpets.engine.kernels.trial import Outcome
from jpets.engine.kernels.trials import Name, run_trials

FINE, CRASH, HANG, GONE = (("double", "8 float32", name) for name in ("fine", "crash", "hang", "gone"))
SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
    name = json.loads(line)
    print("a library's line", json.dumps({"trying": name}), sep="\\n", flush=True)
    if name[2] == "crash":
        os.abort()
    if name[2] == "hang":
        time.sleep(600)
    print(json.dumps({"found": name, "seconds": 0.5, "ratio": 2.0, "out": ""}), flush=True)
    if name[2] == "gone":
        os._exit(3)
"""
"""Does without JAX: starting that takes seconds."""


class Started:
    """How often a process was started, and with what."""

    def __init__(self) -> None:
        self.left: list[list[Name]] = []

    def __call__(self, left: Sequence[Name]) -> subprocess.Popen[str]:
        self.left.append(list(left))
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write("".join(json.dumps(name) + "\n" for name in left))
        process.stdin.close()
        return process


def test_what_a_crash_leaves_is_tried_by_another_process() -> None:
    start = Started()
    found = run_trials([CRASH, GONE, FINE], start, seconds=60)
    assert found[CRASH] == Outcome(out="ended the process that tried it (SIGABRT)")
    assert found[FINE] == found[GONE] == Outcome(0.5, 2.0)
    assert start.left == [[CRASH, GONE, FINE], [GONE, FINE], [FINE]]


def test_a_candidate_that_hangs_is_out() -> None:
    found = run_trials([HANG, FINE], Started(), seconds=60, try_seconds=0.3)
    assert found == {HANG: Outcome(out="was not done within 0.3 s"), FINE: Outcome(0.5, 2.0)}


def test_what_there_is_no_time_for_is_left() -> None:
    found = run_trials([FINE, HANG], Started(), seconds=1.5, try_seconds=60)
    assert found == {FINE: Outcome(0.5, 2.0)}


@pytest.mark.parametrize("code", ["import sys; sys.exit(1)", "pass"])
def test_a_process_that_tries_nothing_is_not_started_again(code: str) -> None:
    started = []

    def start(left: Sequence[Name]) -> subprocess.Popen[str]:
        started.append(left)
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    assert run_trials([FINE], start, seconds=60) == {}
    assert len(started) == 1
