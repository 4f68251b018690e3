"""Which device of several serves which task, and how often each is called."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jpets.deltas.protocol import ClassKey
from jpets.errors import NotFound
from jpets.types import Task, TaskName


@dataclass(frozen=True)
class Home:
    """A task and the devices that serve it. Replaced, never changed: a reader sees one state."""

    devices: tuple[int, ...]
    load: Callable[[], Task]
    version: int | None
    pinned: bool = False
    classes: tuple[ClassKey, ...] = ()


class Homes:
    """Thread-safe. ``calls`` are counted where queries are routed."""

    def __init__(self, devices: int) -> None:
        self._lock = threading.Lock()
        self._homes: dict[TaskName, Home] = {}
        self._tasks = [0] * devices
        self._calls: Counter[TaskName] = Counter()

    def get(self, name: TaskName) -> Home | None:
        return self._homes.get(name)

    def set(self, name: TaskName, home: Home) -> None:
        with self._lock:
            self._count(self._homes.get(name), -1)
            self._homes[name] = home
            self._count(home, 1)

    def remove(self, name: TaskName) -> Home:
        """Raises ``NotFound``."""
        with self._lock:
            home = self._homes.pop(name, None)
            if home is None:
                raise NotFound(f"unknown task {name.id!r}")
            self._count(home, -1)
            self._calls.pop(name, None)
            return home

    def move(self, name: TaskName, devices: tuple[int, ...]) -> None:
        """From now on its queries go to these devices."""
        self.set(name, replace(self._homes[name], devices=devices))

    def at(self, device: int) -> Sequence[TaskName]:
        """The tasks that a device serves."""
        with self._lock:
            return [name for name, home in self._homes.items() if device in home.devices]

    def by_tasks(self) -> Sequence[int]:
        """The devices in order of their number of tasks, fewest first."""
        return sorted(range(len(self._tasks)), key=self._tasks.__getitem__)

    def counts(self) -> Sequence[int]:
        """Tasks of each device."""
        return tuple(self._tasks)

    def __len__(self) -> int:
        return len(self._homes)

    def called(self, names: Counter[TaskName]) -> None:
        """Counts calls; names without a home are left out."""
        with self._lock:
            for name, calls in names.items():
                if name in self._homes:
                    self._calls[name] += calls

    def take_calls(self) -> Counter[TaskName]:
        """Calls since the last time."""
        with self._lock:
            calls, self._calls = self._calls, Counter()
            return calls

    def _count(self, home: Home | None, change: int) -> None:
        for device in home.devices if home else ():
            self._tasks[device] += change
