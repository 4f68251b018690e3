"""Devices as gates see them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import pytest

from jpets.engine.kernels.description import describe
from pallas_kernels.gates import HOPPER, Device, Gate


class Found(NamedTuple):
    """A device as JAX has it."""

    platform: str
    device_kind: str
    compute_capability: str

    def memory_stats(self) -> dict[str, Any]:
        return {"bytes_limit": 1000}


def test_a_gpu_tells_its_capability() -> None:
    found: Any = Found("gpu", "NVIDIA B200", "10.0")
    assert describe(found) == Device("gpu", "NVIDIA B200", (10, 0), 1000)
    assert describe(jax.local_devices(backend="cpu")[0]).capability is None


@pytest.mark.parametrize(
    ("gate", "device", "reason"),
    [
        (Gate(frozenset({"gpu"}), (9, 0)), HOPPER, ""),
        (Gate(frozenset({"gpu"}), (9, 0)), Device("gpu", "B200", (10, 0)), "needs compute capability 9.0 exactly"),
        (Gate(least=(8, 0)), Device("gpu", "B200", (10, 0)), ""),
        (Gate(least=(8, 0)), Device("gpu", "T4", (7, 5)), "needs compute capability 8.0 or later; this is T4 (gpu"),
        (Gate(least=(8, 0)), Device("tpu", "v5"), "8.0 or later"),
    ],
)
def test_a_gate_asks_for_one_capability_or_the_least(gate: Gate, device: Device, reason: str) -> None:
    assert gate.refuses(device).startswith(reason) if reason.startswith("needs") else reason in gate.refuses(device)
    assert bool(gate.refuses(device)) == bool(reason)
