from __future__ import annotations

import subprocess
import sys

import pytest
from runs import Run

HEAVY = ("jax", "numpy", "flax", "transformers", "checkpoints", "sqlalchemy")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, jpets.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize(
    "command", [(), ("task",), ("backbone",), ("query",), ("run",), ("train",), ("jobs",), ("profile",), ("doctor",)]
)
def test_every_command_has_help(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    assert run("tasks").exit_code == 2
