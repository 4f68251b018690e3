"""Students of one group stand on different devices, as Student Parallelism's equation 6 says."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jpets.engine.group.homes import Homes
from jpets.engine.tasks.student_names import group_mark
from jpets.types import TaskName


class Apart(NamedTuple):
    """The group of each student, and how many more of a group's students each device may take."""

    groups: Mapping[TaskName, Hashable]
    left: Sequence[Mapping[Hashable, int]]


def apart(homes: Homes, names: Iterable[TaskName], devices: Sequence[int]) -> Apart:
    """For the students among ``names``: a device takes as many of a group as its share of them, which is one where
    there are as many devices as students. Those that nobody asks for count too."""
    groups: dict[TaskName, Hashable] = {}
    left: list[dict[Hashable, int]] = [{} for _ in devices]
    for name in names:
        if (mark := group_mark(name.id)) is None:
            continue
        groups[name] = group = name.tenant, mark
        if any(group in own for own in left):
            continue
        each = (homes.get(TaskName(name.tenant, f"{mark}{at}")) for at in itertools.count(1))
        places = [home.devices for home in itertools.takewhile(lambda home: home is not None, each) if home is not None]
        standing = Counter(device for own in places for device in own)
        for own, device in zip(left, devices, strict=True):
            own[group] = max(0, -(-len(places) // len(devices)) - standing[device])
    return Apart(groups, left)
