"""Students of one group stand on different devices (Student Parallelism, section 3.3.1, equation 6)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from jpets.engine.group.homes import Homes
from jpets.engine.tasks.student_names import group_mark
from jpets.types import TaskName


class Apart(NamedTuple):
    """The group of each student, and how many more of a group's students each device may take."""

    groups: Mapping[TaskName, Hashable]
    left: Sequence[Mapping[Hashable, int]]


def apart(standing: Mapping[TaskName, Sequence[int]], devices: Sequence[int]) -> Apart:
    """Of the students among the tasks that are asked now, with the devices where each stands: a device takes as many of
    a group as its share of them, which is one where there are as many devices as students. Students that nobody asks
    are no load, and in nobody's way."""
    groups = {name: (name.tenant, mark) for name in standing if (mark := group_mark(name.id)) is not None}
    sizes = Counter(groups.values())
    there = Counter((device, group) for name, group in groups.items() for device in standing[name])
    share = {group: -(-size // len(devices)) for group, size in sizes.items()}
    return Apart(groups, [{group: share[group] - there[device, group] for group in sizes} for device in devices])


def beside(homes: Homes, name: TaskName) -> Counter[int]:
    """How many other students of a student's group each device has."""
    found = Counter[int]()
    if (mark := group_mark(name.id)) is None:
        return found
    names = (TaskName(name.tenant, f"{mark}{at}") for at in itertools.count(1))
    for other in itertools.takewhile(lambda each: homes.get(each) is not None, names):
        if other != name and (home := homes.get(other)) is not None:
            found.update(home.devices)
    return found
