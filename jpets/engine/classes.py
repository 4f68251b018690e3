"""The fixed classes of an engine and how many slots their banks get."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from jpets.config import BackboneConfig, EngineSettings
from jpets.deltas.bank import lower_task, tightest
from jpets.deltas.fold import fold_pooler
from jpets.deltas.protocol import ClassKey
from jpets.engine.device_memory import fit_slots, param_bytes
from jpets.model.encoder import Params
from jpets.types import Task

MOST_PADDING = 2
"""A class is merged into one that covers it unless its rows would then cost more than this times as much."""


def class_slots(
    tasks: Sequence[Task],
    reserve: Sequence[Task],
    config: BackboneConfig,
    params: Params,
    settings: EngineSettings,
    limit: float = math.inf,
) -> tuple[tuple[ClassKey, int], ...]:
    """Each class with its bank's slots: for ``tasks``, for the shapes of ``reserve``, and as many again.

    A class that another one covers is served by that one. Under a ``limit`` in bytes there may be fewer free slots;
    raises ``OutOfSpace`` where the tasks themselves do not fit.
    """
    counts: Counter[ClassKey] = Counter()
    for task, weight in [*((task, 1) for task in tasks), *((task, 0) for task in reserve)]:
        for part in lower_task(fold_pooler(task, config, params), config):
            counts[part.key] += weight
    kept: dict[ClassKey, int] = {}
    for key in sorted(counts, key=ClassKey.volume, reverse=True):
        cover = tightest(key, [own for own in kept if own.volume() <= MOST_PADDING * key.volume()])
        kept[cover or key] = kept.get(cover or key, 0) + counts[key]
    wanted = {key: _bank_size(count, settings.slots) for key, count in kept.items()}
    least = {key: count + 1 for key, count in kept.items()}
    fitting = fit_slots(least, wanted, config, settings.dtype, param_bytes(params, settings.dtype), limit)
    return tuple(sorted(fitting.items()))


def _bank_size(tasks: int, fewest: int) -> int:
    """Room for twice the tasks, in powers of two: one task more must not make every stored program stale."""
    wanted = max(fewest, 2 * tasks) + 1
    return 1 << (wanted - 1).bit_length()
