"""Where one replica's arrays are: on one device, or split over several that compute each batch together.

With several, heads and feed-forward columns are split (tensor parallelism, Shoeybi et al. 2019: Megatron-LM), and XLA
adds the sums between them. Arrays that cannot be split evenly are on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jpets.errors import InvalidInput

MODEL = "model"
"""The mesh's only axis."""
SPLIT = frozenset({"heads", "columns"})
LEAST_SPLIT = 1 << 11
"""Fewest numbers of a slot for which a bank's array is split: gathering a smaller one costs more than it saves."""


class MeshSlice:
    """One device or several. Raises ``InvalidInput`` if ``heads`` is not a multiple of their number."""

    def __init__(self, devices: Sequence[jax.Device], heads: int = 0) -> None:
        if not devices or heads % len(devices):
            raise InvalidInput(f"{heads} attention heads cannot be split evenly over {len(devices)} devices")
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(self.devices), (MODEL,)) if len(devices) > 1 else None

    @property
    def everywhere(self) -> jax.sharding.Sharding:
        """The whole array, on each device."""
        return self._sharding()

    def params(self, params: Any, axes_of: Mapping[str, Sequence[str | None]]) -> Any:
        """A sharding for each parameter (arrays or shapes), by the logical axes of those that may be split. Each device
        has the whole of all others."""

        def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
            axes = axes_of.get(str(path[-1].key), ())
            wanted = [MODEL if axis in SPLIT else None for axis in axes]
            return self._sharding(*wanted) if self._even(leaf.shape, wanted) else self.everywhere

        return jax.tree_util.tree_map_with_path(place, params)

    def bank(self, shape: Sequence[int]) -> jax.sharding.Sharding:
        """The sharding of a bank's array [slots, ...] with slots of this shape: its last axis is split."""
        wanted = [None, *(None for _ in shape[:-1]), MODEL]
        large = len(shape) > 0 and math.prod(shape) >= LEAST_SPLIT
        return self._sharding(*wanted) if large and self._even((1, *shape), wanted) else self.everywhere

    def _sharding(self, *axes: str | None) -> jax.sharding.Sharding:
        if self._mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def _even(self, shape: Sequence[int], axes: Sequence[str | None]) -> bool:
        return all(axis is None or size % len(self.devices) == 0 for size, axis in zip(shape, axes, strict=False))


def first_device() -> MeshSlice:
    return MeshSlice(jax.local_devices()[:1])
