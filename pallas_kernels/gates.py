"""What a candidate of an operator needs: a device that can run it, and operands of sizes that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """A device as gates see it. ``capability`` is CUDA's compute capability, None elsewhere; ``memory`` in bytes."""

    platform: str
    kind: str
    capability: tuple[int, int] | None = None
    memory: int = 0

    def __str__(self) -> str:
        known = f", compute capability {_dotted(self.capability)}" if self.capability else ""
        return f"{self.kind} ({self.platform}{known})"


CPU = Device("cpu", "cpu")
HOPPER = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 80 * 10**9)


@dataclass(frozen=True)
class Gate:
    """``platforms`` none: any. ``capability``: this one **exactly**, as instructions of one generation are gone in the
    next; ``least``: this one or a later one. ``divisible``: XLA can divide it among several devices. ``takes`` gets an
    operator's operands, or their shapes, and ``sizes`` says in words what it asks for."""

    platforms: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None
    least: tuple[int, int] | None = None
    divisible: bool = True
    takes: Callable[..., bool] | None = None
    sizes: str = ""

    def refuses(self, device: Device) -> str:
        """The reason why ``device`` cannot run the candidate; empty if it can."""
        if self.platforms and device.platform not in self.platforms:
            return f"needs a {' or '.join(sorted(self.platforms))}; this is {device}"
        if self.capability is not None and device.capability != self.capability:
            return f"needs compute capability {_dotted(self.capability)} exactly; this is {device}"
        if self.least is not None and (device.capability is None or device.capability < self.least):
            return f"needs compute capability {_dotted(self.least)} or later; this is {device}"
        return ""

    def refuses_operands(self, *operands: Any, **settings: Any) -> str:
        """The reason why the candidate does not take such operands; empty if it does."""
        return "" if self.takes is None or self.takes(*operands, **settings) else f"takes {self.sizes}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def hopper(takes: Callable[..., bool], sizes: str) -> Gate:
    """The gate of kernels with wgmma, Hopper's product of a warpgroup: no other generation has it."""
    return Gate(frozenset({"gpu"}), HOPPER.capability, divisible=False, takes=takes, sizes=sizes)


OPEN = Gate()
