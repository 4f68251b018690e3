"""Servers with limits that are reached at once, and with limits that no test reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from idle_server import LIMITS, PATIENT, Server, serving


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """With limits of a fraction of a second."""
    with serving(LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """With limits that no test reaches by time."""
    with serving(PATIENT) as server:
        yield server
