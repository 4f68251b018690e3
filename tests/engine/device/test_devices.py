"""Devices named on the command line."""

from __future__ import annotations

import jax
import pytest

from jpets.engine.device.devices import choose_devices
from jpets.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "numbers"), [("all", [0, 1, 2, 3]), ("2", [0, 1]), ("0,2", [0, 2]), ("3,", [3]), ("1, 0", [1, 0])]
)
def test_devices_by_words(text: str, numbers: list[int]) -> None:
    assert [jax.local_devices().index(device) for device in choose_devices(text)] == numbers


@pytest.mark.parametrize("text", ["", "0", "5", "1000000000000", "0,0", "0,9", "-1", "cpu", ",", "1.5"])
def test_devices_that_are_not_there(text: str) -> None:
    with pytest.raises(InvalidInput, match="this host has 4 of"):
        choose_devices(text)
