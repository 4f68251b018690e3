"""Where one replica's arrays are: on one device, or split over several that compute each batch together.

With several, heads and feed-forward columns are split (tensor parallelism, Shoeybi et al. 2019: Megatron-LM): each
device runs the program on its part (``jpets.deltas.parts``), and two sums a layer are taken over all of them. Arrays
that cannot be split evenly are on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jpets.deltas.parts import AXIS
from jpets.errors import InvalidInput

SPLIT = frozenset({"heads", "columns"})


class MeshSlice:
    """One device or several. Raises ``InvalidInput`` if ``heads`` is not a multiple of their number."""

    def __init__(self, devices: Sequence[jax.Device], heads: int = 0) -> None:
        if not devices or heads % len(devices):
            raise InvalidInput(f"{heads} attention heads cannot be split evenly over {len(devices)} devices")
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(self.devices), (AXIS,)) if len(devices) > 1 else None

    @property
    def everywhere(self) -> jax.sharding.Sharding:
        """The whole array, on each device."""
        return self._sharding()

    def params(self, params: Any, axes_of: Mapping[str, Sequence[str | None]]) -> Any:
        """A sharding for each parameter (arrays or shapes), by the logical axes of those that may be split. Each device
        has the whole of all others."""

        def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
            axes = axes_of.get(str(path[-1].key), ())
            wanted = [AXIS if axis in SPLIT else None for axis in axes]
            return self._sharding(*wanted) if self._even(leaf.shape, wanted) else self.everywhere

        return jax.tree_util.tree_map_with_path(place, params)

    def bank(self, shape: Sequence[int], axis: int | None = -1) -> jax.sharding.Sharding:
        """The sharding of a bank's array [slots, ...] with slots of this shape, of which ``axis`` is split; None: none
        is."""
        if axis is None or not shape:
            return self.everywhere
        wanted: list[str | None] = [None] * (1 + len(shape))
        wanted[axis if axis < 0 else 1 + axis] = AXIS
        return self._sharding(*wanted) if self._even((1, *shape), wanted) else self.everywhere

    def on_each(self, run: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
        """``run`` on each device's parts of ``arguments`` (shapes with shardings); all devices return the same."""
        if self._mesh is None:
            return run
        parts = jax.tree.map(lambda leaf: leaf.sharding.spec, tuple(arguments))
        return jax.shard_map(run, mesh=self._mesh, in_specs=parts, out_specs=PartitionSpec(), check_vma=False)

    def _sharding(self, *axes: str | None) -> jax.sharding.Sharding:
        if self._mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def _even(self, shape: Sequence[int], axes: Sequence[str | None]) -> bool:
        return all(axis is None or size % len(self.devices) == 0 for size, axis in zip(shape, axes, strict=False))


def first_device() -> MeshSlice:
    return MeshSlice(jax.local_devices()[:1])
