"""The priority of child processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from jpets.engine.programs.child import renice

THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
input()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None and own.stdout.readline()
        yield own
        own.kill()


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="Linux lists a process's threads")
def test_all_threads_of_a_process_get_another_priority(child: subprocess.Popen[str]) -> None:
    assert renice(child, 19)
    threads = [int(thread) for thread in os.listdir(f"/proc/{child.pid}/task")]
    assert len(threads) == 2 and {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {19}
    assert renice(child, 19)


def test_no_child_runs_before_this_process(child: subprocess.Popen[str]) -> None:
    with mock.patch("os.getpriority", return_value=10), mock.patch("os.setpriority") as given:
        assert renice(child, 5)
    assert {call.args[2] for call in given.call_args_list} == {10}


def test_a_priority_that_may_not_be_given(child: subprocess.Popen[str]) -> None:
    with mock.patch("os.setpriority", side_effect=PermissionError):
        assert not renice(child, 5)


def test_a_process_that_ended(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert renice(child, 19), "nothing is left that might run too fast"
