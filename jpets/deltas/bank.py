"""Banks: the stacked device arrays that hold many tasks' deltas of one class. Slot 0 is the no-op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Num, Shaped

from jpets.config import BackboneConfig
from jpets.deltas import HEAD, class_method, method_named
from jpets.deltas.bitfit import BIAS_CLASS
from jpets.deltas.parts import regroup_planes
from jpets.deltas.protocol import ArraySpec, ClassKey, Contribution
from jpets.errors import InvalidTask
from jpets.types import Task
from pallas_kernels.numerics import AnyArray

SlotArrays = Mapping[str, Num[AnyArray, "layers ..."]]
"""The contents of a class's slot, by the names of its arrays: in host memory, or on a device."""


def lower_task(task: Task, config: BackboneConfig) -> list[Contribution]:
    """All contributions of a task to banks: its deltas' slots, its head's, one bias slot for all deltas that change
    biases.

    Two deltas of one method in a task go to different classes (``ordinal``).
    """
    found: list[Contribution] = []
    biases: list[Contribution] = []
    for delta in task.deltas:
        for part in method_named(delta.method).lower(delta, config):
            if part.key == BIAS_CLASS:
                biases.append(part)
            else:
                ordinal = sum(other.key.method == part.key.method for other in found)
                if ordinal and not class_method(part.key.method).repeatable:
                    raise InvalidTask(f"task {task.id!r} has two {part.key.method} deltas; merge them into one")
                key = ClassKey(part.key.method, part.key.sites, part.key.layers, part.key.options, ordinal)
                found.append(Contribution(key, part.arrays))
    if biases:
        own = np.zeros(config.bias_size(), bool)
        values = np.zeros(config.bias_size(), np.float32)
        for part in biases:
            if "own" in part.arrays:
                own |= part.arrays["own"]
                values = np.where(part.arrays["own"], part.arrays["values"], values)
        change = sum((part.arrays["change"] for part in biases if "change" in part.arrays), np.zeros_like(values))
        found.append(Contribution(BIAS_CLASS, {"own": own, "values": values, "change": change}))
    head = HEAD.contribution(task.head)
    return [*found, head] if head else found


def storage_dtype(spec: ArraySpec, dtype: str) -> np.dtype[Any]:
    """bf16 is kept as uint16: writing one slot of a bf16 bank converts the whole bank on a CPU."""
    if spec.dtype == "param":
        return np.dtype(np.uint16 if dtype == "bfloat16" else np.float32)
    return np.dtype(spec.dtype)


def _store(values: npt.NDArray[Any], spec: ArraySpec, dtype: str) -> npt.NDArray[Any]:
    if spec.dtype == "param" and dtype == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return values.astype(storage_dtype(spec, dtype))


def slot_arrays(
    part: Contribution, key: ClassKey, config: BackboneConfig, dtype: str, base_bias: Float[np.ndarray, " b"]
) -> SlotArrays:
    """``part`` padded to the shapes of class ``key`` (which covers it) and in the bank's storage format."""
    specs = class_method(key.method).bank_arrays(key, config)
    if key == BIAS_CLASS:
        bias = np.where(part.arrays["own"], part.arrays["values"], base_bias) + part.arrays["change"]
        return {"bias": _store(bias[None], specs["bias"], dtype)}
    places = [key.layers.index(layer) for layer in part.key.layers]
    padded: dict[str, npt.NDArray[Any]] = {}
    for name, spec in specs.items():
        full = np.full(spec.shape, spec.fill, np.float32 if spec.dtype == "param" else storage_dtype(spec, dtype))
        if name in part.arrays:
            source = part.arrays[name]
            for at, place in enumerate(places):
                own = full[place]
                own[tuple(slice(0, size) for size in source.shape[1:])] = source[at]
        padded[name] = _store(full, spec, dtype)
    return padded


def bytes_on_each(array: Shaped[Array, " ..."]) -> int:
    """Bytes of an array, or of a device's part of it, on each device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * int(array.dtype.itemsize)


class Bank:
    """The device arrays of one class, [slots, layers, ...]. Only the owner thread of the device may write."""

    def __init__(
        self,
        key: ClassKey,
        slots: int,
        config: BackboneConfig,
        dtype: str,
        base_bias: Float[np.ndarray, " b"],
        placed: Callable[[Sequence[int], int | None], jax.sharding.Sharding],
    ) -> None:
        """``placed`` gives the sharding of an array, by the shape of its slots and the axis that may be split."""
        self.key = key
        self.slots = slots
        specs = class_method(key.method).bank_arrays(key, config)
        fills = {n: base_bias if key == BIAS_CLASS else np.asarray(s.fill, np.float32) for n, s in specs.items()}
        firsts = {n: _store(np.broadcast_to(fills[n], s.shape), s, dtype) for n, s in specs.items()}
        shardings = {name: placed(spec.shape, spec.split) for name, spec in specs.items()}
        # All in one program: compiling takes longer than running.
        make = jax.jit(
            lambda rows: {name: jnp.broadcast_to(row, (slots, *row.shape)) for name, row in rows.items()},
            out_shardings=shardings,
        )
        self.arrays: dict[str, jax.Array] = make(firsts)
        assert all(self.arrays[name].dtype == first.dtype for name, first in firsts.items())
        contents = {name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for name, array in self.arrays.items()}
        slot = jax.ShapeDtypeStruct((), np.int32)
        # Compiled now: the first write must not make queries wait for a compilation.
        groups = {name: _plane_groups(self.arrays[name]) if spec.planes else 1 for name, spec in specs.items()}
        update = jax.jit(functools.partial(_write_slot, groups), donate_argnums=0, out_shardings=shardings)
        self._update = update.lower(self.arrays, contents, slot).compile()
        self._slot = jax.jit(functools.partial(_read_slot, groups))

    @property
    def nbytes(self) -> int:
        """Bytes of the bank, or of a device's part of it, on each device."""
        return sum(map(bytes_on_each, self.arrays.values()))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's contents, as ``read`` gives them."""
        return sum(array.nbytes for array in self.arrays.values()) // self.slots

    def read(self, slot: int) -> SlotArrays:
        """A copy of a slot's contents, on the bank's device."""
        copied: dict[str, jax.Array] = self._slot(self.arrays, np.int32(slot))
        return copied

    def write(self, slot: int, arrays: SlotArrays) -> None:
        """Puts one slot's contents in place. The old arrays are donated: they must not be passed to a program after
        that."""
        assert 0 < slot < self.slots
        self.arrays = self._update(self.arrays, dict(arrays), np.int32(slot))


def _plane_groups(array: Shaped[Array, " ..."]) -> int:
    """How many devices have columns of their own in bit planes."""
    return int(array.shape[-1] // array.sharding.shard_shape(array.shape)[-1])


def _read_slot(groups: Mapping[str, int], bank: dict[str, jax.Array], slot: jax.Array) -> dict[str, jax.Array]:
    own = {name: bank[name].at[slot].get(mode="promise_in_bounds") for name in bank}
    return {name: regroup_planes(own[name], groups[name], 1) if groups[name] > 1 else own[name] for name in own}


def _write_slot(
    groups: Mapping[str, int], bank: dict[str, jax.Array], values: dict[str, jax.Array], slot: jax.Array
) -> dict[str, jax.Array]:
    own = {name: regroup_planes(values[name], 1, groups[name]) if groups[name] > 1 else values[name] for name in bank}
    return {name: bank[name].at[slot].set(own[name], mode="promise_in_bounds") for name in bank}


def tightest(key: ClassKey, classes: Sequence[ClassKey]) -> ClassKey | None:
    """The cheapest of ``classes`` that covers ``key``."""
    return min((own for own in classes if own.covers(key)), key=ClassKey.volume, default=None)
