"""Device memory: what an engine takes, exactly, and what still fits under its limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpets.config import BackboneConfig, DType, EngineSettings
from jpets.deltas import class_method
from jpets.deltas.bank import bytes_on_each, storage_dtype
from jpets.deltas.protocol import ClassKey
from jpets.engine.programs.mesh import MeshSlice, first_device
from jpets.engine.programs.network import Network, Params
from jpets.engine.programs.program import Program
from jpets.errors import InvalidInput, OutOfSpace
from jpets.failures import NO_ROOM
from jpets.scheduling.costs.memory_chunks import working_bytes

GIGABYTE = 10**9
WORKING_SHARE = 1 / 16
"""Part of the limit that banks leave to running programs, which are known only once they are compiled."""

TABLE_SHARE = 1 / 8
"""Most of the device's memory that rows take, as a part of it."""


class DeviceUse(NamedTuple):
    """Bytes of one device: shared parameters, all banks with their free slots, merged copies of hot tasks, and running
    programs, those that are measured included."""

    backbone: int
    banks: int
    merged: int
    working: int

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIGABYTE:.2f}" for name, size in self._asdict().items())
        return f"{self.total / GIGABYTE:.2f} GB ({parts})"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had no room for an operation."""
    return isinstance(error, jax.errors.JaxRuntimeError) and NO_ROOM in str(error)


def device_limit(device: jax.Device, gigabytes: float) -> float:
    """Bytes that an engine may take: ``gigabytes``, or for 0 what the allocator may take of the device's memory, which
    is always the most; a CPU sets no limit."""
    there_is: float = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    return min(gigabytes * GIGABYTE, there_is) if gigabytes else there_is


def staged_rows(settings: EngineSettings, config: BackboneConfig, platform: str, limit: float, tokens: int) -> int:
    """How many rows of tables a device has at a time, enough for a batch of so many ``tokens``; 0 where its programs
    read the tables themselves. ``limit`` is in bytes. Raises ``InvalidInput``."""
    if settings.tables == "mapped" and config.looks_up and platform != "cpu":
        raise InvalidInput(f"tables are mapped into the memory of CPUs, found a {platform}: leave tables at auto")
    if not config.looks_up or (settings.tables != "staged" and platform == "cpu"):
        return 0
    row_bytes = math.prod(config.table_shape[1:]) * jnp.dtype(config.table_dtype).itemsize
    room = min(settings.table_memory_gb * GIGABYTE, limit * TABLE_SHARE)
    return max(int(room / row_bytes), tokens)


def param_bytes(network: Network, params: Params, dtype: DType, mesh: MeshSlice | None = None) -> int:
    """Bytes of a backbone's parameters, in the engine's number format, on each device of ``mesh`` (one by default)."""
    mesh = mesh or first_device()
    kept = held(network, jax.eval_shape(functools.partial(network.cast, dtype=dtype), params), mesh)
    placed = mesh.params(kept, network.split_axes)
    parts = jax.tree.map(lambda leaf, own: math.prod(own.shard_shape(leaf.shape)) * leaf.dtype.itemsize, kept, placed)
    return sum(jax.tree.leaves(parts))


def held(network: Network, params: Params, mesh: MeshSlice) -> Params:
    """The parameters that take memory of the devices: a CPU's programs read maps of files where they are."""
    if mesh.devices[0].platform != "cpu":
        return params
    return {name: own for name, own in params.items() if name not in network.mapped}


def tree_bytes(arrays: Any) -> int:
    """Bytes of these arrays, or of a device's part of them, on each device."""
    return sum(map(bytes_on_each, jax.tree.leaves(arrays)))


def slot_bytes(key: ClassKey, config: BackboneConfig, dtype: str, mesh: MeshSlice | None = None) -> int:
    """Bytes of one slot of a class on each device of ``mesh`` (one by default)."""
    specs = class_method(key.method).bank_arrays(key, config).values()
    own = mesh or first_device()
    parts = ((spec, own.bank(spec.shape, spec.split).shard_shape((1, *spec.shape))) for spec in specs)
    return sum(math.prod(part) * storage_dtype(spec, dtype).itemsize for spec, part in parts)


def banks_bytes(
    slots: Mapping[ClassKey, int], config: BackboneConfig, dtype: str, mesh: MeshSlice | None = None
) -> int:
    """``slot_bytes`` of banks with these numbers of slots, slot 0 included."""
    return sum(count * slot_bytes(key, config, dtype, mesh) for key, count in slots.items())


def fit_slots(
    least: Mapping[ClassKey, int],
    wanted: Mapping[ClassKey, int],
    parts: Mapping[ClassKey, int],
    config: BackboneConfig,
    dtype: str,
    backbone: int,
    limit: float,
    mesh: MeshSlice | None = None,
) -> dict[ClassKey, int]:
    """``wanted`` slots of each class, or fewer free ones if a limit of so many bytes a device is too small for them: at
    most the same number for each of its ``parts``.

    Raises ``OutOfSpace`` where even ``least`` do not fit.
    """
    room = limit * (1 - WORKING_SHARE) - backbone
    most = max((-(-count // parts[key]) for key, count in wanted.items()), default=0)
    while True:
        chosen = {key: max(least[key], min(count, most * parts[key])) for key, count in wanted.items()}
        taken = banks_bytes(chosen, config, dtype, mesh)
        if taken <= room:
            return chosen
        if most < 1:
            raise OutOfSpace(
                f"the tasks known at start take {taken / GIGABYTE:.2f} GB of device memory beside the backbone's "
                f"{backbone / GIGABYTE:.2f} GB; {limit / GIGABYTE:.2f} GB may be used, a sixteenth of it by running "
                "batches: raise the limit (--device-memory-gb) or load fewer tasks"
            )
        most //= 2


class DeviceMemory:
    """Memory of one replica's arrays and programs, under a ``limit`` in bytes, with ``at_a_time`` batches on the
    device. ``mapped`` bytes of the parameters are no memory of it."""

    def __init__(
        self, backbone: int, banks: Mapping[ClassKey, int], limit: float, at_a_time: int, mapped: int = 0
    ) -> None:
        self._backbone = backbone
        self._mapped = mapped
        self.banks = dict(banks)
        self._at_a_time = at_a_time
        self.limit = limit
        self.merged = 0
        """Bytes of merged copies of hot tasks, while they are kept."""
        self.measuring = 0
        """Bytes that measuring of costs takes, while it lasts."""

    def use(self, programs: Iterable[Program]) -> DeviceUse:
        """Arrays exactly; programs by their compiler's figures, in chunks in which any of them can run."""
        needs = [self._need(program) for program in programs]
        working = working_bytes(needs, self._at_a_time) + self.measuring
        return DeviceUse(self._backbone, sum(self.banks.values()), self.merged, working)

    def holds(self, programs: Sequence[Program]) -> bool:
        """Whether these programs may be resident together."""
        return self.use(programs).total <= self.limit

    def check(self, programs: Sequence[Program]) -> None:
        """Raises ``OutOfSpace`` where the limit is too small for these programs."""
        use = self.use(programs)
        if use.total > self.limit:
            raise OutOfSpace(
                f"the engine needs {use} of device memory and may take {self.limit / GIGABYTE:.2f} GB; "
                "raise the limit (--device-memory-gb), or allow fewer slots or fewer tokens in a batch"
            )

    def _need(self, program: Program) -> int:
        """Bytes that a run takes besides the resident arrays: inputs, temporary arrays, outputs."""
        found = program.memory
        if found is None:
            return 0
        resident = self._backbone + self._mapped + sum(self.banks[key] for key in program.key.variant.classes())
        inputs = max(0, found.argument_size_in_bytes - resident)
        return int(found.temp_size_in_bytes + found.output_size_in_bytes + inputs)
