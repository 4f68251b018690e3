"""A server's own process: ``python -m jpets.serve`` over loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ["--dtype", "float32", "--max-length", "32", "--max-batch-tokens", "64", "--reserve", "never", "--port", "0"]


def start(*options: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jpets.serve", *map(str, options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
    )


def url_of(process: subprocess.Popen[str]) -> str:
    """Where it answers, once it is ready."""
    assert process.stdout is not None
    found = re.search(r"http://[\d.:]+", process.stdout.readline())
    assert found, process.stderr
    return found[0]
