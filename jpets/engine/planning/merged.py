"""Merged copies: dense weights of hot tasks, kept within a budget of device memory (PetS section 7)."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

import jax
import numpy as np

from jpets.config import EngineSettings
from jpets.engine.device.memory import GIGABYTE, DeviceMemory, is_out_of_memory, tree_bytes
from jpets.engine.device.replica import Replica
from jpets.engine.programs.network import Params
from jpets.engine.tasks.entries import Resident
from jpets.errors import Saturated

log = logging.getLogger(__name__)

HALF_LIFE = 30.0
"""Half-life of what a copy could have saved, in seconds."""
PAYS_WITHIN = 3600.0
"""Seconds in which a copy must save as much as it takes to make, at the rate of the latest traffic."""
REST = 60.0
"""Seconds without copies after the device had no memory."""
CLEARLY = 2.0
"""A copy leaves for another one that would have saved at least this many times as much."""


def copies_budget(settings: EngineSettings) -> float:
    """Bytes for copies; 0 if answers must not depend on traffic."""
    if settings.merged_memory_gb and settings.policy == "steady":
        log.warning("no task gets merged weights: that takes another policy than steady")
        return 0.0
    return settings.merged_memory_gb * GIGABYTE


class MergedCopies:
    """One replica's copies. ``saves`` is told the seconds that copies save, or would; a thread makes the best ones.

    ``copies`` is a mapping that never changes; a new mapping takes its place.
    """

    def __init__(
        self, replica: Replica, params: Params, budget: float, memory: DeviceMemory, half_life: float = HALF_LIFE
    ) -> None:
        self.copies: Mapping[Resident, Params] = MappingProxyType({})
        self._replica = replica
        self._host = params
        self._memory = memory
        self._half_life = half_life
        self._size = tree_bytes(replica.family.network.merge_target(replica.params))
        self.most = int(budget // self._size)
        self._saved: dict[Resident, tuple[float, float]] = {}
        """(seconds, when): halved with every half-life since then."""
        self._failed: dict[Resident, float] = {}
        """Tasks that could not be merged, and the time before which that is not tried again."""
        self._rests_until = 0.0
        """Time before which no copies are made: there was no memory for them."""
        self._changed = threading.Condition()
        self._closed = False
        self._making = 0.0
        """Seconds that the last copy took to make."""
        self._thread = threading.Thread(target=self._work, name="jpets-merge", daemon=True)

    @property
    def enabled(self) -> bool:
        return self.most > 0

    def start(self) -> None:
        if self.enabled:
            self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def saves(self, seconds: Mapping[Resident, float]) -> None:
        """Notes how much faster a batch was, or would have been, with copies of these tasks."""
        now = time.monotonic()
        with self._changed:
            for resident, saved in seconds.items():
                self._saved[resident] = (self._hotness(resident, now) + saved, now)
            self._changed.notify()

    def may_have(self, resident: Resident) -> bool:
        """Whether there is, or could be, a copy of a task."""
        not_before = max(self._failed.get(resident, 0.0), self._rests_until)
        return not resident.removed and time.monotonic() >= not_before

    def clear(self) -> None:
        """Frees all their memory: something else needs it more."""
        with self._changed:
            self._keep({})
            self._saved.clear()
            self._rests_until = time.monotonic() + REST

    def _hotness(self, resident: Resident, now: float) -> float:
        saved, since = self._saved.get(resident, (0.0, now))
        return saved * math.pow(0.5, (now - since) / self._half_life)

    def _keep(self, copies: Mapping[Resident, Params]) -> None:
        self.copies = MappingProxyType(dict(copies))
        self._memory.merged = len(copies) * self._size

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (chosen := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
                assert chosen is not None
                if self._full:  # the coldest leaves first: there is no room for both
                    if self.copies:  # else other threads took the room since
                        self._keep(self._without_coldest())
                    if self._full:
                        continue
                self._memory.merged += self._size
            self._bring(chosen)

    def _bring(self, resident: Resident) -> None:
        """Makes a copy, for which memory was reserved, and keeps it if it is still wanted."""
        start = time.monotonic()
        copy: Params | None = None
        try:
            copy = self._make(resident)
            self._making = time.monotonic() - start
        except Exception as error:  # its task is served by its delta, as before
            log.exception("a task could not be merged")
            if is_out_of_memory(error):
                self.clear()
            else:  # a storage that is away comes back
                passes = isinstance(error, (Saturated, OSError))
                self._failed[resident] = time.monotonic() + REST if passes else math.inf
        with self._changed:
            wanted = copy is not None and not resident.removed and self._rests_until < start
            self._keep({**self.copies, resident: copy} if wanted else self.copies)  # type: ignore[dict-item]

    def _make(self, resident: Resident) -> Params:
        family = self._replica.family
        with _host_memory():
            merged = family.network.merged(resident.whole(), self._host, family.dtype)
            host = jax.tree.map(np.asarray, merged)
        return {**self._replica.params, **jax.block_until_ready(self._replica.place(host))}

    def _next(self) -> Resident | None:
        """The hottest task without a copy, if a copy is worth making and worth the place of another one."""
        now = time.monotonic()
        gone = [resident for resident in {*self._saved, *self.copies} if resident.removed]
        for resident in gone:
            self._saved.pop(resident, None)
        if any(resident in self.copies for resident in gone):
            self._keep({resident: copy for resident, copy in self.copies.items() if not resident.removed})
        self._failed = {own: until for own, until in self._failed.items() if until > now and not own.removed}
        hot = {r: self._hotness(r, now) for r in self._saved if r not in self.copies and r not in self._failed}
        if not hot or now < self._rests_until:
            return None
        best = max(hot, key=lambda resident: hot[resident])
        rate = hot[best] * math.log(2) / self._half_life
        if rate <= 0 or self._making > rate * PAYS_WITHIN:
            return None
        if not self._full:
            return best
        if not self.copies:
            return None
        coldest = min(self._hotness(resident, now) for resident in self.copies)
        return best if hot[best] > CLEARLY * coldest else None

    @property
    def _full(self) -> bool:
        if len(self.copies) >= self.most:
            return True
        return self._memory.use(self._replica.programs).total + self._size > self._memory.limit

    def _without_coldest(self) -> dict[Resident, Params]:
        now, staying = time.monotonic(), dict(self.copies)
        del staying[min(staying, key=lambda resident: self._hotness(resident, now))]
        return staying


def _host_memory() -> contextlib.AbstractContextManager[object]:
    """Where weights are merged: in host memory, unless the process was told to have no other device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()
