"""What moves between devices may take: room where a task goes, and bytes on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jpets.scheduling.queue import Bools, Floats, Ints

T = TypeVar("T", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Room(Generic[T]):
    """``sizes`` of the tasks, ``free`` room of each device, ``budget`` for all moves together, in one unit: bytes, say
    (the size of a task without an entry is 1). ``places``: how many free places of each kind a device has; a task takes
    one of each kind that it ``takes`` (slots of classes). ``left``: how many more tasks of one of ``groups`` a device
    takes. None is no limit.

    A task that leaves makes no room for others that move with it: its old place serves until the moves are over.
    """

    sizes: Mapping[T, float] = dataclasses.field(default_factory=dict)
    free: Sequence[float] | None = None
    budget: float = math.inf
    takes: Mapping[T, Collection[Hashable]] = dataclasses.field(default_factory=dict)
    places: Sequence[Mapping[Any, int]] | None = None
    groups: Mapping[T, Hashable] = dataclasses.field(default_factory=dict)
    left: Sequence[Mapping[Hashable, int]] | None = None

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes.values()) or self.budget < 0:
            raise ValueError("sizes and the budget of moves must not be negative")

    def size(self, task: T) -> float:
        return self.sizes.get(task, 1.0)

    def check(self, devices: int) -> None:
        """Raises ``ValueError`` where the room of some of these devices is missing."""
        for given in (self.free, self.places, self.left):
            if given is not None and len(given) != devices:
                raise ValueError(f"expected free room for each of {devices} devices, got {len(given)}")


class RoomLeft(Generic[T]):
    """What is left of a ``Room`` while moves are chosen, as arrays over devices and ``tasks``."""

    def __init__(self, room: Room[T], devices: int, tasks: Sequence[T]) -> None:
        self.sizes = np.array([room.size(task) for task in tasks], float)
        self.budget = room.budget
        self._free: Floats = np.full(devices, np.inf) if room.free is None else np.array(room.free, float)
        every = [frozenset(room.takes.get(task, ())) if room.places is not None else frozenset() for task in tasks]
        sets = list(dict.fromkeys(every))
        number = {own: at for at, own in enumerate(sets)}
        self._set: Ints = np.array([number[own] for own in every], int)
        """The set of kinds that a task takes: there are few sets, and may be many tasks."""
        kinds = list(dict.fromkeys(kind for own in sets for kind in own))
        wanted = [[kind in own for kind in kinds] for own in sets]
        self._wanted: Bools = np.array(wanted, bool).reshape(len(sets), len(kinds))
        places = room.places or [{}] * devices
        left = [[own.get(kind, 0) for kind in kinds] for own in places]
        self._places: Ints = np.array(left, int).reshape(devices, len(kinds))
        groups = list(dict.fromkeys(room.groups.values())) if room.left is not None else []
        at = {group: number for number, group in enumerate(groups)}
        self._group: Ints = np.array([at.get(room.groups.get(task), len(groups)) for task in tasks], int)
        """The group of a task; the last one is of those without."""
        self._left: Ints = np.full((devices, len(groups) + 1), len(tasks) + 1)
        for device, own in enumerate(room.left or ()):
            self._left[device, : len(groups)] = [own.get(group, 0) for group in groups]

    def fits(self, tasks: int | Ints) -> Bools:
        """Whether each device [devices, ...] has room for a task."""
        free = np.minimum(self.budget, self._free)[(...,) + (None,) * np.ndim(tasks)]
        missing = (self._places < 1) @ self._wanted.T  # [devices, sets]
        fits: Bools = (self.sizes[tasks] <= free) & ~missing[:, self._set[tasks]]
        return fits & (self._left[:, self._group[tasks]] > 0)

    def take(self, task: int, device: int) -> None:
        self._free[device] -= self.sizes[task]
        self._places[device] -= self._wanted[self._set[task]]
        self._left[device, self._group[task]] -= 1
        self.budget -= float(self.sizes[task])
