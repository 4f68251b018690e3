"""Failures of JAX and of memory become one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.source import DEMO_BACKBONE
from jpets.errors import NotFound, OutOfSpace
from jpets.failures import as_told


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (MemoryError(), OutOfSpace, "the host has no memory left"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), OutOfSpace, "the device has no memory"),
        (NotFound("no such task"), NotFound, "no such task"),
    ],
)
def test_failures_that_a_user_can_mend(error: Exception, kind: type[Exception], told: str) -> None:
    found = as_told(error)
    assert isinstance(found, kind) and told in found.message


@pytest.mark.parametrize(
    "error", [RuntimeError("a fault"), ValueError("RESOURCE_EXHAUSTED"), KeyError("a"), AssertionError()]
)
def test_faults_of_the_program_keep_their_traceback(error: Exception) -> None:
    assert as_told(error) is None


@pytest.mark.parametrize(
    "arguments, platform",
    [(("jpets.serve", "--demo", "--port", "0"), "tpu"), (("jpets", "profile", "--backbone", DEMO_BACKBONE), "gpus")],
)
def test_a_platform_that_is_not_there(arguments: tuple[str, ...], platform: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", *arguments, "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": platform}, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "JAX finds no device" in done.stderr.splitlines()[-1]
