"""A device as the gates of candidates see it."""

from __future__ import annotations

import jax

from pallas_kernels.gates import Device


def describe(device: jax.Device) -> Device:
    """CUDA devices tell their compute capability; memory is what JAX may take, 0 where it does not say."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    memory = int((device.memory_stats() or {}).get("bytes_limit", 0)) if device.platform != "cpu" else 0
    return Device(device.platform, device.device_kind, capability, memory)
