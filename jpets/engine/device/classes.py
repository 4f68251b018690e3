"""The fixed classes of an engine and how many slots their banks get."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jpets.config import BackboneConfig, EngineSettings
from jpets.deltas import class_method
from jpets.deltas.bank import tightest
from jpets.deltas.bitfit import BIAS_CLASS
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.memory import fit_slots, param_bytes, slot_bytes
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.network import Network, Params
from jpets.errors import OutOfSpace
from jpets.types import Task

log = logging.getLogger(__name__)

LOWERING = 2
"""Rises when a task's classes change: servers then compute again what they remember of their tasks."""
USUAL_ROWS = 128
"""Rows of a batch of which each may be another task's."""
MOST_PADDING = 2
"""A class is merged into one that covers it unless that makes its rows cost more than this many times as much."""


def class_slots(
    tasks: Sequence[Task],
    reserve: Sequence[Task],
    coming: Mapping[ClassKey, int],
    network: Network,
    params: Params,
    settings: EngineSettings,
    limit: float = math.inf,
    mesh: MeshSlice | None = None,
) -> tuple[tuple[ClassKey, int], ...]:
    """Each class with its bank's slots: for ``tasks``, for the shapes of ``reserve``, for the registered tasks that are
    ``coming``, and as many free ones again. Coming tasks can share slots, so theirs are limited.

    A class that another one covers is served by that class. Under a ``limit`` in bytes, each device's, there may be
    fewer free slots, and coming tasks may have one in turn; classes of theirs for which even that is too much are left
    out, those that take most first. Raises ``OutOfSpace`` where the tasks that stay on the device do not fit.
    """
    stay = Counter(key for task in tasks for key in network.classes(task, params))
    shapes = {key for task in reserve for key in network.classes(task, params)}
    kept: dict[ClassKey, _Members] = {}
    for key, cover in covered({*stay, *shapes, *coming}).items():
        members = kept.get(cover, _Members(0, 0))
        kept[cover] = _Members(members.stay + stay[key], members.coming + coming.get(key, 0))
    taken = param_bytes(network, params, settings.dtype, mesh)
    sizes = {key: slot_bytes(key, network.config, settings.dtype, mesh) for key in kept}
    rows = USUAL_ROWS
    while True:
        parts = class_parts(kept, network.config, settings.dtype, mesh)
        wanted = {key: members.wanted(settings, parts[key]) for key, members in kept.items()}
        least = {key: members.least(settings, rows) for key, members in kept.items()}
        try:
            fitting = fit_slots(least, wanted, parts, network.config, settings.dtype, taken, limit, mesh)
            return tuple(sorted(fitting.items()))
        except OutOfSpace:
            some = [key for key, members in kept.items() if not members.stay and key not in shapes]
            if rows == 1 and not some:
                raise
            if rows == 1:
                left_out = max(some, key=lambda key: (sizes[key], key))
                log.warning(
                    "tasks of a shape cannot be served: the device has no room for them; raise --device-memory-gb",
                    extra={"class": str(left_out), "tasks": kept.pop(left_out).coming},
                )
            rows = 1


def covered(keys: Iterable[ClassKey]) -> dict[ClassKey, ClassKey]:
    """Each class with the class of the list that serves it: itself, or one that covers it without much padding. The
    result does not depend on their order."""
    found: dict[ClassKey, ClassKey] = {}
    for key in sorted(keys, key=lambda key: (key.volume(), key), reverse=True):
        own = [other for other in dict.fromkeys(found.values()) if other.volume() <= MOST_PADDING * key.volume()]
        found[key] = tightest(key, own) or key
    return found


def class_parts(
    keys: Iterable[ClassKey], config: BackboneConfig, dtype: str, mesh: MeshSlice | None = None
) -> dict[ClassKey, int]:
    """How many classes' tasks each class has room for: 1, but for heads and biases, which tasks of every other class
    have too, as many as the classes that may need them, in no more bytes than the largest of those takes."""
    sizes = {key: slot_bytes(key, config, dtype, mesh) for key in keys}
    own = [size for key, size in sizes.items() if class_method(key.method).kind != "head"]
    return {
        key: max(1, min(len(own), max(own) // size)) if own and _is_shared(key) else 1 for key, size in sizes.items()
    }


def _is_shared(key: ClassKey) -> bool:
    return key == BIAS_CLASS or class_method(key.method).kind == "head"


class _Members(NamedTuple):
    """Tasks of a class: those that stay on the device, and tasks that may leave it."""

    stay: int
    coming: int

    def wanted(self, settings: EngineSettings, parts: int) -> int:
        """Room for twice the tasks, in powers of two: one more task must not make every stored program stale."""
        rounded = 1 << max(settings.slots * parts, 2 * (self.stay + self.coming)).bit_length()
        return min(rounded, 2 * self.stay + settings.max_slots * parts + 1) if self.coming else rounded

    def least(self, settings: EngineSettings, rows: int) -> int:
        """The least slots: for tasks that may leave, as many as a batch has ``rows``. Larger batches are then cut."""
        return self.stay + min(self.coming, settings.max_batch_rows, settings.max_slots, rows) + 1
