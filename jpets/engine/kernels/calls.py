"""Calls of operators, by the shapes of their operands: what is tried out, and what a choice is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.gates import OPEN, Device, Gate


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operator."""

    compute: Callable[..., jax.Array]
    gate: Gate = OPEN


@dataclass(frozen=True)
class Call:
    """An operator's call. ``operands`` and ``settings`` are as the program passes them, by place and by name; shapes
    stand for arrays.

    ``shape`` names the sizes that a choice depends on: those of a class, not the number of tokens or slots.
    """

    operator: str
    shape: str
    operands: tuple[Any, ...]
    settings: Mapping[str, Any]

    @property
    def name(self) -> tuple[str, str]:
        return self.operator, self.shape


@dataclass(frozen=True)
class Sample:
    """Operands drawn at random, by place and by name.

    ``own``: the rows of the result that mean something, None for all. ``kept``: what all other rows must be bit by bit,
    None where they may be anything.
    """

    operands: tuple[Any, ...]
    settings: Mapping[str, Any]
    own: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    kept: np.ndarray[Any, np.dtype[Any]] | None = None


@dataclass(frozen=True)
class Operator:
    """An operator with its candidates. The first is the reference, with which all others are compared.

    ``loops``: the reference goes through its runs one by one, and an accelerator waits for the host at each. There it
    says what is right, and computes only where nothing else is.
    """

    candidates: Mapping[str, Candidate]
    sample: Callable[[Call, np.random.Generator], Sample]
    default: Callable[[Device], str]
    """The candidate that computes it before anything was measured."""
    loops: bool = False

    @property
    def reference(self) -> str:
        return next(iter(self.candidates))

    def open(self, device: Device) -> list[str]:
        """The candidates that ``device`` can run, of which one is chosen."""
        return [
            name
            for name, each in self.candidates.items()
            if not each.gate.refuses(device) and not (self.is_last_resort(name) and device.platform != "cpu")
        ]

    def is_last_resort(self, name: str) -> bool:
        """Whether an accelerator should compute a candidate only where no other one is right."""
        return self.loops and name == self.reference

    def refusal(self, name: str, device: Device, call: Call) -> str:
        """The reason why a candidate is out before it is tried; empty if there is none."""
        gate = self.candidates[name].gate
        return gate.refuses(device) or gate.refuses_operands(*call.operands, **call.settings)


Table = Mapping[str, Operator]


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def shapes_of(operands: Any) -> Any:
    """The same tree with shapes in the places of arrays, traced or not."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf, operands)
