"""Moves tasks from device to device while they are served (multi-GPU PetS section 2.3.2)."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from jpets.engine.engine import Engine
from jpets.engine.group.apart import beside
from jpets.engine.group.homes import Home, Homes
from jpets.engine.group.readers import Readers
from jpets.errors import JpetsError, NotFound
from jpets.types import TaskName

log = logging.getLogger(__name__)

POLL = 0.005
"""Seconds between looks whether a task's last query at its old place is answered."""


class Mover:
    """A move copies the task, then sends its queries to the new place, then frees the old place once its last query
    there is answered. Until the copy is there nothing changes, and nothing ever does if copying fails.
    """

    def __init__(self, members: Sequence[Engine], homes: Homes, readers: Readers, changes: threading.RLock) -> None:
        self._members = members
        self._homes = homes
        self._readers = readers
        self._changes = changes
        self._leaving: dict[tuple[TaskName, int], object] = {}
        """Each stay of a task at a device has an object of its own: it may leave, come back and leave again."""
        self.counts: Counter[str] = Counter()
        """Tasks ``moved`` and ``copied``, moves that ``failed``, tasks that were ``rescued``, and the ``bytes`` that
        were copied."""

    @property
    def leaving(self) -> int:
        """Old places that still have queries."""
        return len(self._leaving)

    def move(self, name: TaskName, source: int, target: int, *, copy: bool = False) -> bool:
        """Makes ``target`` a home of the task, and no longer ``source`` unless it is a ``copy``.

        False where it failed, where the task is not at ``source`` any more, or where ``target`` does not work; it is
        served as before. Returns once new queries go to the new place.
        """
        if source == target:
            raise ValueError(f"a task moves to another device; {target} is its own")
        with self._changes:
            home = self._homes.get(name)
            if home is None or source not in home.devices or target in home.devices:
                return False
            if not self._members[target].live:
                return False
            try:
                self._bring(name, home, source, target)
            except Exception as error:
                if not isinstance(error, JpetsError):
                    log.exception("a task could not be moved", extra={"task": name.id})
                self.counts["failed"] += 1
                return False
            stay = home.devices if copy else tuple(device for device in home.devices if device != source)
            self._leaving.pop((name, target), None)
            self._homes.move(name, (*stay, target))
            self.counts["copied" if copy else "moved"] += 1
            if not copy:
                self._leave(name, source)
        return True

    def withdraw(self, name: TaskName, device: int) -> None:
        """Removes one of several homes of a task."""
        with self._changes:
            home = self._homes.get(name)
            if home is None or device not in home.devices or len(home.devices) == 1:
                return
            self._homes.move(name, tuple(each for each in home.devices if each != device))
            self._leave(name, device)

    def rescue(self, lost: Collection[int]) -> None:
        """Gives the tasks of devices that do not work any more to others, which load them when a query comes: nothing
        can be copied from there. Where no device works nothing changes."""
        if len(lost) == len(self._members):
            return
        for name in {name for device in lost for name in self._homes.at(device)}:
            with self._changes:
                home = self._homes.get(name)
                if home is None or not set(home.devices) & set(lost):  # it was moved or removed meanwhile
                    continue
                stay = tuple(device for device in home.devices if device not in lost)
                if not stay:
                    others = [device for device in self._homes.by_tasks() if device not in lost]
                    others.sort(key=beside(self._homes, name).__getitem__)
                    target = next((device for device in others if self._members[device].live), others[0])
                    self._register(name, home, target)
                    stay = (target,)
                self._homes.move(name, stay)
                self.counts["rescued"] += 1
                for device in home.devices:
                    if device not in stay:
                        self._leave(name, device)

    def leave(self, name: TaskName, devices: Iterable[int]) -> None:
        """Notes the homes that a caller, which holds the lock of changes, took from a task."""
        for device in devices:
            self._leave(name, device)

    def forget(self, name: TaskName) -> None:
        """Drops the old places of a task that a caller, which holds the lock of changes, removed."""
        for device in [own for each, own in self._leaving if each == name]:
            self._forget(name, device)

    def tidy(self) -> None:
        """Frees old places that have answered their last query. To be called now and then."""
        with self._changes:
            waiting = dict(self._leaving)
        if not waiting:
            return
        self._readers.settle()  # queries that saw the old home are submitted by now
        for (name, device), stay in waiting.items():
            with self._changes:
                home = self._homes.get(name)
                if self._leaving.get((name, device)) is not stay:  # already freed, or the task came back and left again
                    continue
                if home is not None and device in home.devices:
                    del self._leaving[name, device]
                elif self._members[device].idle(name.id, tenant=name.tenant):
                    self._forget(name, device)

    def wait(self, seconds: float) -> bool:
        """Until every old place is free; False if that takes longer than ``seconds``."""
        end = time.monotonic() + seconds
        while self._leaving:
            if time.monotonic() > end:
                return False
            self.tidy()
            time.sleep(POLL)
        return True

    def _bring(self, name: TaskName, home: Home, source: int, target: int) -> None:
        """The task at its new place, not shown to queries yet."""
        tenant, id = name
        loaded = self._members[source].export(id, tenant=tenant)
        if loaded is None:  # not queried lately: it is loaded when a query comes
            self._register(name, home, target)
        else:
            entry = self._members[source].tasks.entry(tenant, id)
            here = self._members[target].replica.take_in(loaded.contents)
            self._members[target].adopt(
                replace(loaded, contents=here),
                tenant=tenant,
                version=home.version,
                load=home.load,
                cost=entry.cost if entry else 0.0,
                pinned=home.pinned,
            )
            self.counts["bytes"] += loaded.nbytes

    def _register(self, name: TaskName, home: Home, target: int) -> None:
        self._leaving.pop((name, target), None)
        self._members[target].register_task(
            name.id, home.load, tenant=name.tenant, version=home.version, pinned=home.pinned, classes=home.classes
        )

    def _leave(self, name: TaskName, device: int) -> None:
        self._leaving[name, device] = object()

    def _forget(self, name: TaskName, device: int) -> None:
        self._leaving.pop((name, device), None)
        try:
            self._members[device].remove_task(name.id, tenant=name.tenant)
        except NotFound:
            log.debug("a task had left its old device already", extra={"task": name.id})
